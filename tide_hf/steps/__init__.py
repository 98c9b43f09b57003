"""Steps of fixed shape, made ready once and run again: compiled on CPUs, CUDA graphs on GPUs.

`fixed_cache` and `step_buffers` are the tensors that steps read and write; `captured_steps` keeps the steps, which
`replay` captures on a GPU and `compiled_steps` compiles on a CPU. `operation_log` finds layers that do the same,
`step_graphs` traces them and has Inductor compile them, `joined_linears` gives their graphs the kernels of `cpu/`, and
`compiled_layers` has single layers compiled by `torch.compile`. `warm_up` counts what all of that takes.
"""
