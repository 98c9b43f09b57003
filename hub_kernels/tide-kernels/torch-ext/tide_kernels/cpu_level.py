"""Which instructions of this CPU the C++ ops are compiled for."""

from __future__ import annotations

import torch


def cpu_level() -> str:
    """The level as `stage.py` names it. `ATEN_CPU_CAPABILITY` in the environment lowers it, as it does PyTorch's."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and torch.cpu._is_avx512_bf16_supported():
        has_amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()  # asks Linux for it, for all threads
        return "amx" if has_amx else "avx512bf16"
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(capability, "default")
