"""Steps of fixed shape, prepared once and run again: compiled, and on GPUs captured as CUDA graphs.

`static_cache` and `step_buffers` are the tensors that steps read and write. `step_store` keeps the steps. It has
`step_compiler` compile them, by `graphs` of layers with the kernels that `fused_linears` gives them, and on GPUs
`capture` capture them.
"""
