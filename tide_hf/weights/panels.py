"""Weights in panels of 16 rows, which the kernels read at the speed of memory (`panels.h` of the kernels).

A panel holds the same columns of its rows next to each other, so one register multiplies 16 rows of the weight by one
value of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common.huge_pages import empty_in_huge_pages

PANEL_ROWS = 16
# Columns of a row that lie next to each other in a panel.
COLUMNS = {torch.float16: 1, torch.bfloat16: 2, torch.int8: 4}
INT4_COLUMNS = 8


class LayoutError(ValueError):
    """A layout cannot hold a weight, or not its values. Never leaves the library: another layout is taken."""


def in_panels(weight: Tensor) -> Tensor:
    """Rearrange a weight (out, in) in half precision or int8 to (out / 16, in / n, 16, n), the last panel padded.

    n is what `COLUMNS` says. Raises [`LayoutError`] if `in` is no multiple of it.
    """
    together = COLUMNS[weight.dtype]
    if weight.shape[1] % together:
        raise LayoutError
    return _panels_of(weight, together)


def int4_in_panels(integers: Tensor) -> Tensor:
    """Pack integers (out, in) from 0 to 15 into panels, (out / 16, in / 8, 16, 4) uint8.

    Of 8 columns the even ones fill the first two bytes, from the lowest bits, and the odd ones the others.
    """
    nibbles = integers.to(torch.uint8).unflatten(1, (-1, 2, 2, 2)).transpose(2, 4)  # ..., odd, half, byte
    return _panels_of((nibbles[..., 0, :] | nibbles[..., 1, :] << 4).flatten(1), INT4_COLUMNS // 2)


def scales_in_panels(scales: Tensor, zeros: Tensor) -> Tensor:
    """Rearrange scales and zeros (out, groups) of groups of integers to (out / 16, groups, 2, 16)."""
    both = _padded(torch.stack([scales, zeros], dim=-1).float())
    return both.view(-1, PANEL_ROWS, *both.shape[1:]).permute(0, 2, 3, 1).contiguous()


def _panels_of(weight: Tensor, together: int) -> Tensor:
    padded = _padded(weight)
    panels = padded.view(-1, PANEL_ROWS, padded.shape[1] // together, together).permute(0, 2, 1, 3)
    return empty_in_huge_pages(panels.shape, panels.dtype).copy_(panels)


def _padded(weight: Tensor) -> Tensor:
    return pad(weight.contiguous(), (0, 0) * (weight.dim() - 1) + (0, -len(weight) % PANEL_ROWS))
