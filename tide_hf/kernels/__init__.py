"""Fused kernels: the ops, what they compute in plain PyTorch, and how the kernels are loaded.

`ops` names the GPU kernels and decides which kernels a model gets; `fetch` fetches them from the Hub and verifies them;
`reference` has what runs in plain PyTorch where there are none. `flash_decode` is PyTorch's own attention, for steps on
a GPU. `cpu/` uses the CPU kernels. `compile_cache` has the private folder that Inductor compiles into. `hub` is a link
to the kernels' sources, `hub_kernels/tide-kernels`.
"""
