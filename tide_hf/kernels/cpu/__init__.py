"""CPU kernels for decode, verify and prefill.

`cpp_kernels` fetches the C++ kernels of `hub_kernels/tide-kernels` or builds and keeps them. `attention` calls the
kernels for attention.
"""
