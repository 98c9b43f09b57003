"""CPU kernels for decode, verify and prefill.

`cpp_kernels` compiles the C++ kernels and caches them on disk. `gemm` holds the matrix products, over weights as the
model stores them or quantised; `decode_attention` and `prefill_attention` hold attention. `weight_layouts` are the
layouts in which a linear layer can read its weights, and `layout_choice` measures which of them is the fastest.
"""
