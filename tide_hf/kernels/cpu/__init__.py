"""CPU kernels for decode, verify and prefill.

`cpp_kernels` compiles the C++ kernels, caches them on disk and registers them as PyTorch ops. `attention` calls the
kernels for attention. `weight_layouts` holds the layouts in which a linear layer can read its weights, the
matrix products with them, and the measurement of which layout is the fastest.
"""
