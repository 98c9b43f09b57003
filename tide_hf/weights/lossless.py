"""Copies of weights that hold the same values, in few bits and in the order in which the kernels read them the fastest.

Many weights in float32 come from fewer bits: most models are published in half precision, and GGUF files hold integers,
which transformers dequantises when it loads them. Here those bits are found again from the values, kept beside the
weight in panels, and checked to give each of its values. The skinny GEMM reads them and computes in float32, as it
would with the weight itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import StoredWeight
from .panels import LayoutError, in_panels, int4_in_panels, scales_in_panels

VALUES_AT_ONCE = 1 << 16  # which stay in a core's cache
GROUP_SIZES = (32, 16)  # weights per scale in all types of GGUF that dequantise linearly
SAMPLED_GROUPS = 64
LEAST_SCALE = 1e-30  # avoids a division by zero in groups of equal values
MANTISSA_BITS = 23  # of float32
# Significant bits of a scale beside a zero: of a product of float16 and six bits. Times an integer they still fit into
# float32, so that a fused multiply-add rounds once as well.
SCALE_BITS = 17
LEAST_GAP = 1e-6  # between two integers, as a share of a group's range
MAX_STEPS = 255
MAX_INT4 = 15
# What differences between neighbouring values may be multiples of.
DIVISORS = (1, 2, 3, 4)


class HalfWeight(StoredWeight):
    """A weight in half precision; the constructor raises [`LayoutError`] where this lacks a value."""

    pays_after, upcasts = 12, True

    def _convert(self, weights: list[Tensor]) -> None:
        (weight,) = weights
        dtype = _exact_dtype(weight) if weight.dtype is torch.float32 else weight.dtype
        if dtype is None:
            raise LayoutError
        self.values, self.scales = in_panels(weight.to(dtype)), weight.new_empty(0, dtype=torch.float32)


class RequantizedWeight(StoredWeight):
    """A float32 weight as int4 or int8, with a scale and a zero for each group; see [`HalfWeight`]."""

    probed_value = 0.1  # which half precision lacks
    pays_after = 64  # the conversion takes as long as some twenty passes over one token

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Whether the dtype is float32 as well."""
        return dtype is torch.float32 and HalfWeight.serves(dtype, rows)

    def _convert(self, weights: list[Tensor]) -> None:
        (weight,) = weights
        if _exact_dtype(weight) is not None:  # its values are on no such grid, which takes longer to see
            raise LayoutError
        found = next(filter(None, (_requantized(weight, size) for size in GROUP_SIZES)), None)
        if found is None:
            raise LayoutError
        integers, scales, zeros = found
        lowest, highest = integers.aminmax()
        is_int4 = lowest >= 0 and highest <= MAX_INT4
        self.values = int4_in_panels(integers) if is_int4 else in_panels(integers)
        scales = scales_in_panels(scales, zeros)
        halves = scales.half()  # exact for GGUF, except for types whose scales are products of two numbers
        self.scales = halves if torch.equal(halves.float(), scales) else scales


def _exact_dtype(weight: Tensor) -> torch.dtype | None:
    """The dtype of half precision that has all values of a weight; `None` if neither has."""
    values = weight.detach().contiguous().flatten()
    lower_halves = values.view(torch.int16)[int(sys.byteorder == "big") :: 2]
    if not lower_halves.count_nonzero():  # four times as fast as converting the weight and comparing
        return torch.bfloat16
    is_exact = all(torch.equal(part.half().float(), part) for part in values.split(VALUES_AT_ONCE))
    return torch.float16 if is_exact else None


class _Groups(NamedTuple):
    """Groups as integers: a value is `scales * integers + zeros`, each rounded once."""

    integers: Tensor  # (groups, size) float32, from -128 to 127
    scales: Tensor  # (groups, 1)
    zeros: Tensor  # (groups, 1)
    are_exact: Tensor  # (groups,) bool


class _Grid(NamedTuple):
    """How the values of groups are spread: at `steps` distances from their lowest one, or from 0 to their largest."""

    steps: int
    has_zeros: bool

    def fit(self, groups: Tensor) -> _Groups:
        """Fit this grid to groups (groups, size)."""
        lowest, highest = groups.aminmax(dim=1, keepdim=True)
        if self.has_zeros:
            return _fit(groups, _rounded((highest - lowest) / self.steps), lowest)
        return _fit(groups, torch.maximum(highest, -lowest) / self.steps, torch.zeros_like(lowest))


# Of GGUF's Q4_0, Q4_1 and Q4_K; of Q5_1 and Q5_K; of Q8_0; of Q5_K and Q6_K.
GRIDS = (_Grid(15, True), _Grid(31, True), _Grid(127, False), _Grid(32, False))


def _requantized(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """The integers (out, in), scales and zeros (out, groups) of a weight (out, in); `None` if they lack a value."""
    rows, size = weight.shape
    if size % group_size or weight.numel() == 0:
        return None
    groups = weight.detach().reshape(-1, group_size)
    sample = groups[:: max(1, len(groups) // SAMPLED_GROUPS)]
    grid = max(GRIDS, key=lambda grid: int(grid.fit(sample).are_exact.sum()))
    if not _with_others(grid.fit(sample), sample).are_exact.all():
        return None
    integers, scales = groups.new_empty(groups.shape, dtype=torch.int8), groups.new_empty(len(groups), 2)
    end = 0
    for part in groups.split(max(1, VALUES_AT_ONCE // group_size)):
        start, end = end, end + len(part)
        found = _with_others(grid.fit(part), part)
        if not found.are_exact.all():
            return None
        integers[start:end] = found.integers
        scales[start:end] = torch.cat([found.scales, found.zeros], dim=1)
    return integers.view(rows, size), scales[:, 0].view(rows, -1), scales[:, 1].view(rows, -1)


def _with_others(found: _Groups, groups: Tensor) -> _Groups:
    """Fit other grids, guessed from the least difference of values, where `found` is not exact; it is changed."""
    if found.are_exact.all():
        return found
    others = (~found.are_exact).nonzero()[:, 0]
    for fitted in _guesses(groups[others]):
        better = others[fitted.are_exact]
        for whole, part in zip(found, fitted, strict=True):
            whole[better] = part[fitted.are_exact]
    return found


def _guesses(groups: Tensor) -> Iterator[_Groups]:
    lowest, highest = groups.aminmax(dim=1, keepdim=True)
    length, no_zeros = highest - lowest, torch.zeros_like(lowest)
    gaps = groups.sort(dim=1).values.diff(dim=1)
    gap = gaps.masked_fill(gaps <= LEAST_GAP * length, torch.inf).amin(dim=1, keepdim=True)
    for divisor in DIVISORS:
        scales = length / (length / gap * divisor).round().clamp(1, MAX_STEPS)
        yield _fit(groups, _rounded(scales), lowest)
        yield _fit(groups, scales, no_zeros)
    yield _fit(groups, length, lowest)  # two values, of any distance


def _fit(groups: Tensor, scales: Tensor, zeros: Tensor) -> _Groups:
    """The nearest integers for scales and zeros (groups, 1), and whether they give the values of groups."""
    scales = scales.clamp_min(LEAST_SCALE)
    integers = ((groups - zeros) / scales).round_().clamp_(-128, 127)
    return _Groups(integers, scales, zeros, (integers * scales).add_(zeros).eq(groups).all(dim=1))


def _rounded(scales: Tensor) -> Tensor:
    """Positive values, rounded to `SCALE_BITS` significant bits."""
    unit = 1 << (MANTISSA_BITS + 1 - SCALE_BITS)
    return ((scales.view(torch.int32) + unit // 2) & -unit).view(torch.float32)
