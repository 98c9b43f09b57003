"""Fused ops for early exit and self-speculative decoding.

Builds for GPUs have them in Triton and (for some of them, in some builds) CUDA C++; `plain.py` beside
their sources has each in plain PyTorch. Any hidden size, any number of rows, strided and empty inputs.
Builds for CPUs have products, attention, decoder layers for few tokens, and the best of logits, in C++. float32,
float16 and bfloat16; sums are float32.
"""

from __future__ import annotations

from ._ops import ops

if hasattr(ops, "skinny_gemm"):  # this build's library is for CPUs
    from .cpu import (
        are_samples,
        decode_attention,
        decoder_layers,
        implementations,
        prefill_attention,
        skinny_gemm,
        top_tokens,
    )

    __all__ = [
        "are_samples",
        "decode_attention",
        "decoder_layers",
        "implementations",
        "prefill_attention",
        "skinny_gemm",
        "top_tokens",
    ]
else:
    from .kv_cache import kv_compact
    from .registration import implementations
    from .routing import norm_route
    from .vocabulary import draft_top1

    __all__ = ["draft_top1", "implementations", "kv_compact", "norm_route"]
