"""Float32 weights read in fewer bits without loss, in passes over few tokens, which are bound by reading weights.

Most models are published in half precision. Loaded in float32, their weights end in bits that are all zero. The skinny
GEMM reads the other half and computes in float32, with the same result bit for bit as from the plain weight.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from .cpp_kernels import load_op
from .weight_layouts import StoredWeight

MAX_ROWS = 16  # of the input; products of more rows are compute-bound
CHECKED_VALUES = 1 << 18  # at a time, which stay in a core's cache


class HalfWeight(StoredWeight):
    """A float32 weight in half precision, where that has all its values."""

    pays_after = 12  # the conversion takes as long as two passes, and halves what each reads

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Whether the dtype is float32, there are few rows, and the kernel can be compiled."""
        return dtype is torch.float32 and rows <= MAX_ROWS and load_op("skinny_gemm", dtype) is not None

    @staticmethod
    def holds(weight: Tensor) -> bool:
        """Whether a dtype of half precision has all values of the weight."""
        return _exact_dtype(weight) is not None

    def _convert(self, weights: list[Tensor]) -> None:
        (weight,) = weights
        dtype = _exact_dtype(weight)
        assert dtype is not None  # `holds` was asked first
        self.values, self.scales = weight.to(dtype, memory_format=torch.contiguous_format), weight.new_empty(0)


def _exact_dtype(weight: Tensor) -> torch.dtype | None:
    """The dtype of half precision that has all values of a weight; `None` if neither has."""
    values = weight.detach().contiguous().flatten()
    lower_halves = values.view(torch.int16)[int(sys.byteorder == "big") :: 2]
    if not lower_halves.count_nonzero():  # four times as fast as converting the weight and comparing
        return torch.bfloat16
    is_exact = all(torch.equal(part.half().float(), part) for part in values.split(CHECKED_VALUES))
    return torch.float16 if is_exact else None
