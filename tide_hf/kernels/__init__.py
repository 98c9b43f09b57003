"""Fused kernels: the ops that have one, their reference in plain PyTorch, and how the kernels are loaded.

`ops` names the GPU kernels, decides whether they can run and fetches them from the Hub; `reference` implements each in
plain PyTorch. `cpu/` compiles the CPU kernels, into the private folder of `compile_cache`.
"""
