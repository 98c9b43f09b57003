"""Steps of fixed shape, prepared once and run many times: compiled, and on GPUs captured as CUDA graphs.

`step_tensors` has the inputs and results of steps, `step_buffers` the draft and verify passes over a `static_cache`,
`exit_steps` those that may end early. `step_store` prepares and keeps steps: `step_compiler` compiles steps, `graphs`
traces and compiles their graphs, `fused_linears` fuses linear layers in these graphs, and on GPUs
`dequantised_products` fuses dequantisation with products, and `capture` captures steps as CUDA graphs.
"""
