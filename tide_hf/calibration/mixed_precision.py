"""Products of matrices in bfloat16 while heads are trained, on devices that are faster at them."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..common.timing import least_seconds

SIZE, REPEATS = 1024, 3
GAIN = 1.5  # for less than that the rounding is not worth it


def mixed_precision(device: torch.device) -> torch.autocast:
    """What a training step's forward has to be inside of; weights, gradients and sums stay in float32.

    Args:
        device: Of the weights.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=gains_by_bfloat16(device.type))


@lru_cache
@torch.inference_mode()
def gains_by_bfloat16(device_type: str) -> bool:
    """Whether products in bfloat16 take clearly less time than in float32; measured on a CPU, once."""
    if device_type != "cpu":
        return device_type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return _seconds(torch.bfloat16) * GAIN < _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    factor = torch.full((SIZE, SIZE), 0.5, dtype=dtype)
    return least_seconds(lambda: factor @ factor, REPEATS)
