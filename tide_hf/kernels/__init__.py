"""Ops that fused kernels run: their names, their reference in plain PyTorch, and where the kernels come from.

`ops` names the ops and decides whether a kernel runs them, `reference` has each in plain PyTorch, and `loader` fetches
the kernels for GPUs from the Hub. `cpu/` compiles those for CPUs, into the private folder of `compile_cache`.
"""
