"""Fused kernels: the ops, their reference implementations in plain PyTorch, and how the kernels are loaded.

`ops` names the GPU kernels and decides which kernels a model gets; `fetch` fetches them from the Hub and verifies them;
`reference` implements each GPU op in plain PyTorch. `flash_decode` is PyTorch's own attention, for steps on a GPU.
`cpu/` uses the CPU kernels. `compile_cache` has the private folder that Inductor compiles into. `hub` is a link to the
kernels' sources, `hub_kernels/tide-kernels`.
"""
