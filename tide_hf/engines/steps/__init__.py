"""Steps of fixed shape, made ready once and run again: compiled, and on GPUs captured as CUDA graphs.

`fixed_cache` and `step_buffers` are the tensors that steps read and write, and `row_map` says which row is whose.
`step_store` keeps the steps. `compiled_steps` compiles them, and `compiled_prompts` what reads a prompt on a CPU. On a
GPU `captured_steps` has `replay` capture them besides, with the model's forward as `capturable_forward` has it run.
`layer_graphs` makes graphs of layers: `operation_log` finds those that do the same, `step_graphs` traces them and has
Inductor compile them, `fused_linears` gives them the kernels of `kernels/cpu/`. `module_facts` is what graphs of a
module depend on, and `warm_up` counts what all of that takes.
"""
