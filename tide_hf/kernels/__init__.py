"""Fused kernels: the ops, their reference implementations in plain PyTorch, and how the kernels are loaded.

`ops` names the GPU kernels, decides whether they can run and fetches them from the Hub; `reference` implements each op
in plain PyTorch. `cpu/` compiles the CPU kernels, into the private folder of `compile_cache`.
"""
