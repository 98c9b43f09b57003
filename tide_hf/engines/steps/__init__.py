"""Steps of fixed shape, prepared once and run many times: compiled, and on GPUs captured as CUDA graphs.

`static_cache` and `step_buffers` have the tensors that steps read and write, `exit_steps` those of passes that end
early. `step_store` prepares and keeps steps: `step_compiler` compiles steps, `graphs` traces and compiles their graphs,
`fused_linears` fuses linear layers in these graphs, and on GPUs `dequantised_products` fuses dequantisation with
products, and `capture` captures steps as CUDA graphs.
"""
