"""Fused ops for early exit and self-speculative decoding, in Triton and (for some of them, in some builds) CUDA C++.

Every op has a reference of the same name in plain PyTorch in `tide_hf.kernels.reference`. Any hidden size, any number
of rows, strided and empty inputs, float32, float16 and bfloat16; sums are float32.
"""

from __future__ import annotations

from .compaction import exit_compact, exit_scatter
from .kv_cache import kv_compact
from .registration import implementations
from .routing import norm_route
from .vocabulary import draft_top1

__all__ = [
    "draft_top1",
    "exit_compact",
    "exit_scatter",
    "implementations",
    "kv_compact",
    "norm_route",
]
