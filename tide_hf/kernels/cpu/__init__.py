"""CPU kernels for decode, verify and prefill.

`cpp_kernels` fetches the C++ kernels of `hub_kernels/tide-kernels` or builds and keeps them. `attention` calls the
kernels for attention. `weight_layouts` holds the layouts in which a linear layer can read its weights, the
matrix products with them, and the measurement of which layout is the fastest. `integer_weights` multiplies weights that
another package has quantised, and `lossless_weights` those in float32 that came from fewer bits.
"""
