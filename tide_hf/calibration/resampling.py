"""Sums over items drawn with replacement, from which intervals are read."""

from __future__ import annotations

import torch
from torch import Tensor

RESAMPLES = 1000
RESAMPLED_AT_ONCE = 2**20  # items, all resamples together: 8 MB a column


def resampled_sums(values: Tensor, seed: int = 0) -> Tensor:
    """(items, columns) -> (RESAMPLES, columns), sums over as many items, drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    count = len(values)
    at_once = max(1, RESAMPLED_AT_ONCE // count)
    parts = [min(at_once, RESAMPLES - start) for start in range(0, RESAMPLES, at_once)]
    return torch.cat([values[torch.randint(count, (part, count), generator=generator)].sum(dim=1) for part in parts])
