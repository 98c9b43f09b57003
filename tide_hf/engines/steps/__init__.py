"""Steps of fixed shape, prepared once and run many times: compiled, and on GPUs captured as CUDA graphs.

`static_cache` and `step_buffers` have the tensors that steps read and write. `step_store` prepares and keeps steps:
`step_compiler` compiles them from `graphs`, whose linear layers `fused_linears` fuses, and on GPUs `capture` captures
them.
"""
