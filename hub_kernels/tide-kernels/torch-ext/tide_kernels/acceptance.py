"""`accept_drafts`: how many drafts of each row were right, and the token behind them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .registration import on_device_of, register, require


@triton.jit
def _accept_kernel(
    drafts,
    draft_row_stride,
    draft_stride,
    verified,
    verified_row_stride,
    verified_stride,
    n_matches,
    bonus_token,
    num_drafts,
    BLOCK: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    ok = places < num_drafts
    drafted = tl.load(drafts + row * draft_row_stride + places * draft_stride, mask=ok, other=-1)
    chosen = tl.load(verified + row * verified_row_stride + places * verified_stride, mask=ok, other=-1)
    matches = tl.min(tl.where(ok & (drafted != chosen), places, num_drafts), axis=0)
    tl.store(n_matches + row, matches.to(tl.int64))
    tl.store(bonus_token + row, tl.load(verified + row * verified_row_stride + matches * verified_stride))


def _accept_drafts_triton(drafts: Tensor, verified: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_drafts = drafts.shape
    n_matches, bonus_token = _accept_drafts_fake(drafts, verified)
    if num_rows:
        with on_device_of(drafts):
            _accept_kernel[(num_rows,)](
                drafts,
                *drafts.stride(),
                verified,
                *verified.stride(),
                n_matches,
                bonus_token,
                num_drafts,
                BLOCK=triton.next_power_of_2(max(1, num_drafts)),
            )
    return n_matches, bonus_token


def _accept_drafts_fake(drafts: Tensor, _verified: Tensor) -> tuple[Tensor, Tensor]:
    n_matches = torch.empty(drafts.shape[0], dtype=torch.int64, device=drafts.device)
    return n_matches, torch.empty_like(n_matches)


_accept_drafts = register(
    "accept_drafts(Tensor drafts, Tensor verified) -> (Tensor, Tensor)", _accept_drafts_triton, _accept_drafts_fake
)


def accept_drafts(drafts: Tensor, verified: Tensor) -> tuple[Tensor, Tensor]:
    """The longest prefix of each row's drafts that equals what the full model chose, and the token behind it.

    Args:
        drafts: (rows, K) int64 draft tokens; -1, which equals none, behind a shorter draft.
        verified: (rows, K + 1) int64 tokens of the full model.

    Returns:
        (rows,) int64 `n_matches` and (rows,) int64 `bonus_token`.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    fits = drafts.dim() == verified.dim() == 2 and verified.shape == (drafts.shape[0], drafts.shape[1] + 1)
    shapes = [tuple(tensor.shape) for tensor in (drafts, verified)]
    require(fits, "accept_drafts", f"shapes {shapes}", "(rows, K) and (rows, K + 1)")
    dtypes = drafts.dtype, verified.dtype
    require(dtypes == (torch.int64,) * 2, "accept_drafts", f"{dtypes[0]} and {dtypes[1]}", "int64")
    return _accept_drafts(drafts, verified)
