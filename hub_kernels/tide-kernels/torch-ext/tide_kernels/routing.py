"""`norm_route`: norm, router MLP and sigmoid in one launch.

Several programs share a row, each with some of the router's hidden units, since a single one could not read the
router's weights fast enough. The last to finish adds up their partial sums in a fixed order, so results do not vary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norms import NORMS, normalized, row_statistics
from .registration import on_device_of, register, require

MANY_ROWS = 256  # from so many rows on, tl.dot multiplies
_counters: dict[tuple[torch.device, int], Tensor] = {}


@triton.jit
def _norm_route_kernel(
    hidden_states,
    norm_weight,
    norm_bias,
    down_weight,
    down_bias,
    up_weight,
    up_bias,
    partials,
    counters,
    scores,
    row_stride,
    col_stride,
    down_row_stride,
    down_col_stride,
    num_rows,
    size,
    rank,
    eps,
    NORM: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    HAS_DOWN_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    USE_DOT: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
):
    """One program: ROWS rows, RANKS of the router's hidden units."""
    num_parts = tl.num_programs(1)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    units = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    row_ok, unit_ok = rows < num_rows, units < rank
    pointers = hidden_states + rows * row_stride
    mean, scale = row_statistics(pointers, row_ok, col_stride, size, eps, NORM, ROWS, BLOCK)

    if USE_DOT:
        total = tl.zeros((ROWS, RANKS), tl.float32)
    else:
        products = tl.zeros((ROWS, RANKS, BLOCK), tl.float32)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        col_ok = cols < size
        ok = row_ok[:, None] & col_ok[None, :]
        x = tl.load(pointers[:, None] + cols[None, :] * col_stride, mask=ok, other=0.0)
        y = normalized(x, mean, scale, norm_weight, norm_bias, cols, col_ok, NORM, HAS_NORM_BIAS)
        at = units.to(tl.int64)[:, None] * down_row_stride + cols[None, :] * down_col_stride
        w = tl.load(down_weight + at, mask=unit_ok[:, None] & col_ok[None, :], other=0.0).to(tl.float32)
        if USE_DOT:
            total = tl.dot(y, tl.trans(w), total, input_precision="ieee")
        else:
            products += y[:, None, :] * w[None, :, :]
    if not USE_DOT:
        total = tl.sum(products, axis=2)

    if HAS_DOWN_BIAS:
        total += tl.load(down_bias + units, mask=unit_ok, other=0.0).to(tl.float32)[None, :]
    up = tl.load(up_weight + units, mask=unit_ok, other=0.0).to(tl.float32)
    part = tl.sum(total * tl.sigmoid(total) * up[None, :], axis=1)
    tl.store(partials + rows * num_parts + tl.program_id(1), part, mask=row_ok)

    tl.debug_barrier()  # all of this program's stores come before its arrival
    arrived = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel")
    if arrived == num_parts - 1:
        blocks = tl.arange(0, RANK_BLOCKS)
        ok = row_ok[:, None] & (blocks < num_parts)[None, :]
        at = rows[:, None] * num_parts + blocks[None, :]
        logit = tl.sum(tl.load(partials + at, mask=ok, other=0.0, cache_modifier=".cg"), axis=1)
        if HAS_UP_BIAS:
            logit += tl.load(up_bias).to(tl.float32)
        tl.store(scores + rows, tl.sigmoid(logit), mask=row_ok)
        tl.store(counters + tl.program_id(0), 0)  # ready for the next launch


def _norm_route_triton(
    hidden_states: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    eps: float,
    norm: int,
    counters: Tensor,
) -> Tensor:
    (num_rows, size), rank = hidden_states.shape, down_weight.shape[0]
    scores = _norm_route_fake(hidden_states)
    if num_rows == 0:
        return scores
    use_dot = num_rows >= MANY_ROWS
    rows = 32 if use_dot else min(4, triton.next_power_of_2(num_rows))
    ranks = 32 if use_dot else 4
    block = min(64 if use_dot else 1024 // rows, max(16, triton.next_power_of_2(size)))
    num_parts = triton.cdiv(rank, ranks)
    partials = torch.empty((num_rows, num_parts), dtype=torch.float32, device=hidden_states.device)
    with on_device_of(hidden_states):
        _norm_route_kernel[triton.cdiv(num_rows, rows), num_parts](
            hidden_states,
            norm_weight,
            norm_bias,
            down_weight,
            down_bias,
            up_weight,
            up_bias,
            partials,
            counters,
            scores,
            *hidden_states.stride(),
            *down_weight.stride(),
            num_rows,
            size,
            rank,
            eps,
            NORM=norm,
            HAS_NORM_BIAS=norm_bias is not None,
            HAS_DOWN_BIAS=down_bias is not None,
            HAS_UP_BIAS=up_bias is not None,
            USE_DOT=use_dot,
            ROWS=rows,
            RANKS=ranks,
            BLOCK=block,
            RANK_BLOCKS=triton.next_power_of_2(num_parts),
        )
    return scores


def _norm_route_fake(hidden_states: Tensor, *_args: object) -> Tensor:
    return torch.empty(hidden_states.shape[0], dtype=torch.float32, device=hidden_states.device)


_norm_route = register(
    "norm_route(Tensor hidden_states, Tensor norm_weight, Tensor? norm_bias, Tensor down_weight, Tensor? down_bias, "
    "Tensor up_weight, Tensor? up_bias, float eps, int norm, Tensor(a!) counters) -> Tensor",
    _norm_route_triton,
    _norm_route_fake,
)


def norm_route(
    hidden_states: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    *,
    eps: float,
    norm: str = "rms",
) -> Tensor:
    """Final norm, router MLP and sigmoid.

    Args:
        hidden_states: (N, D), before the norm; float32, float16 or bfloat16.
        norm_weight: (D,) in the dtype of `hidden_states`, or float32.
        norm_bias: (D,), for `norm="layer"`; `None` for none.
        down_weight: (R, D) of the router's first linear layer, float32.
        down_bias: (R,) float32 or `None`.
        up_weight: (1, R) of its second, float32.
        up_bias: (1,) float32 or `None`.
        eps: Of the norm.
        norm: `"rms"`, `"rms_float32"`, `"rms_one_plus"` or `"layer"`; see `norms.NORMS`.

    Returns:
        (N,) scores in [0, 1], float32.

    Raises:
        ValueError: Shapes do not fit, or there is no such norm.
    """
    require(norm in NORMS, "norm_route", f"norm={norm!r}", f"one of {NORMS}")
    fits = hidden_states.dim() == 2 and down_weight.dim() == 2 and up_weight.numel() == down_weight.shape[0]
    fits = fits and hidden_states.shape[1] == down_weight.shape[1] == norm_weight.numel() > 0
    shapes = [tuple(tensor.shape) for tensor in (hidden_states, norm_weight, down_weight, up_weight)]
    require(fits, "norm_route", f"shapes {shapes}", "(N, D), (D,), (R, D), (1, R)")
    return _norm_route(
        hidden_states,
        norm_weight.contiguous(),
        norm_bias if norm_bias is None else norm_bias.contiguous(),
        down_weight,
        down_bias,
        up_weight.reshape(-1).contiguous(),
        up_bias,
        eps,
        NORMS.index(norm),
        _zeroed_counters(hidden_states),
    )


def _zeroed_counters(hidden_states: Tensor) -> Tensor:
    """At least one int32 zero per row. Each launch resets them to zero, so they are allocated once per stream.

    Inside a CUDA graph, and under `torch.compile`, they belong to the graph, which may be replayed on any stream.
    """
    device, num_rows = hidden_states.device, hidden_states.shape[0]
    if torch.compiler.is_compiling() or (hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.zeros(num_rows, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream if hidden_states.is_cuda else 0
    if key not in _counters or _counters[key].numel() < num_rows:
        _counters[key] = torch.zeros(max(1024, num_rows), dtype=torch.int32, device=device)
    return _counters[key]
