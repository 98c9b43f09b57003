"""Fused kernels: the ops that have one, their reference in plain PyTorch, and how the kernels are loaded.

`ops` names the ops and decides whether a kernel runs them, `reference` implements each in plain PyTorch, and `loader`
fetches the GPU kernels from the Hub. `cpu/` compiles the CPU kernels, into the private folder of `compile_cache`.
"""
