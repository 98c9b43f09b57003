"""Matrix products for passes over few tokens: C++ compiled for this CPU.

A verify pass over a few tokens is bound by the bandwidth with which it reads the weights. oneDNN costs 12 us to start
each product (120 products a pass in a model of 30 layers) and needs a copy of the weights in its own layout.

The skinny GEMM reads the model's own weights sequentially, once for all rows of the input. It sums in the same order
for any number of rows, so a pass over several tokens rounds as passes over single tokens do. The group-wise quantised
GEMM, for few rows, reads a half or a quarter of the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from .cpp_kernels import is_loaded, load_op

MAX_QUANTIZED_ROWS = 8


def skinny_gemm_for(dtype: torch.dtype) -> OpOverload | None:
    """The op that multiplies by weights as the model stores them; it is compiled if it has to be.

    Returns:
        Takes the input (..., in), contiguous weights (out, in), and a bias (sum of out,) or `None`; returns
        (..., sum of out). `None` where there is no kernel.
    """
    return load_op("skinny_gemm", dtype, _skinny_gemm_fake)


def has_skinny_gemm(dtype: torch.dtype) -> bool:
    """Whether this process or an earlier one has compiled the kernel; nothing is compiled."""
    return is_loaded("skinny_gemm", dtype)


def _skinny_gemm_fake(input: Tensor, weights: list[Tensor], _bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], sum(weight.shape[0] for weight in weights)))


def groupwise_gemm_for(dtype: torch.dtype) -> OpOverload | None:
    """The op that multiplies by group-wise quantised weights: integers from 1 to 127 with zero point 64.

    Returns:
        Takes the input (..., in), of at most `MAX_QUANTIZED_ROWS` rows, weights (out, groups, 64) uint8, their scales
        (out, groups) float32, and a bias (out,) or `None`; returns (..., out). `None` where there is no kernel.
    """
    return load_op("groupwise_gemm", dtype, _groupwise_gemm_fake)


def _groupwise_gemm_fake(input: Tensor, weight: Tensor, _scales: Tensor, _bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))
