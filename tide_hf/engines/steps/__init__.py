"""Steps of fixed shape, prepared once and run again: compiled, and on GPUs captured as CUDA graphs.

`static_cache` and `step_buffers` are the tensors that steps read and write, and `row_map` maps sequences to rows in
them. `step_store` keeps the steps. `compiled_steps` compiles them, and `compiled_prefill` the layers of prefill on a
CPU. On a GPU `captured_steps` also captures them with `replay`, while `capturable_forward` adapts the model's forward.

`layer_graphs` makes graphs of decoder layers: `operation_log` finds layers with equal operations, `step_graphs` traces
graphs and compiles them, and `fused_linears` gives them the kernels of `kernels/cpu/`. `module_guards` are the
properties of a module that graphs depend on, and `progress` counts and shows what warm-up takes.
"""
