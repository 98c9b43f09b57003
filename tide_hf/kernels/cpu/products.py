"""Products with weights as a model stores them, or rounded: C++ compiled for this CPU.

A verify pass over a few tokens reads every weight once and computes little. oneDNN starts each product anew (12 us,
120 products a pass in a model of 30 layers) and wants a copy of the weights in its own layout. This product reads the
stored ones in the order in which they stand, for all rows at once. It adds up in the same order whatever the number of
rows is, so a pass over several tokens rounds as passes over one do. Of weights that were rounded to 7 bits, for a few
rows, it reads half as many bytes, or a quarter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from .compiled import is_loaded, load_op

MOST_ROUNDED_ROWS = 8


def stored_product_of(dtype: torch.dtype) -> OpOverload | None:
    """What multiplies values of a dtype.

    Returns:
        Takes the input (..., in), contiguous weights (out, in), and a bias (sum of out,) or `None`; returns
        (..., sum of out). `None` where there is no kernel.
    """
    return load_op("stored_rows", dtype, _like)


def has_stored_product(dtype: torch.dtype) -> bool:
    """Whether there is such a kernel already, by this process or an earlier one: nothing is compiled."""
    return is_loaded("stored_rows", dtype)


def _like(input: Tensor, weights: list[Tensor], _bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], sum(weight.shape[0] for weight in weights)))


def rounded_product_of(dtype: torch.dtype) -> OpOverload | None:
    """What multiplies values of a dtype by weights from 1 to 127, of which 64 stands for zero.

    Returns:
        Takes the input (..., in), of at most `MOST_ROUNDED_ROWS` rows, weights (out, lines, 64) uint8, their scales
        (out, lines) float32, and a bias (out,) or `None`; returns (..., out). `None` where there is no kernel.
    """
    return load_op("rounded_rows", dtype, _like_rounded)


def _like_rounded(input: Tensor, weight: Tensor, _scales: Tensor, _bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))
