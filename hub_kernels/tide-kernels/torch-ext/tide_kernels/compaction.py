"""`exit_compact` sorts the rows that continue before those that exit; `exit_scatter` writes them back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .registration import nothing, on_device_of, register, require, require_indices, require_rows

CHUNK = 1024  # rows that are counted together
ROWS = 16  # rows that one program moves; divides CHUNK


@triton.jit
def _count_kernel(exit_mask, mask_stride, chunk_counts, num_rows, CHUNK: tl.constexpr):
    """Count the continuing rows of each chunk."""
    rows = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    exits = tl.load(exit_mask + rows * mask_stride, mask=rows < num_rows, other=1)
    tl.store(chunk_counts + tl.program_id(0), tl.sum((exits == 0).to(tl.int32), axis=0))


@triton.jit
def _compact_kernel(
    hidden_states,
    row_stride,
    col_stride,
    exit_mask,
    mask_stride,
    chunk_counts,
    rows_out,
    indices,
    counts,
    num_rows,
    size,
    ONE_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move BLOCK columns of ROWS rows to their sorted position."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    chunk = first // CHUNK
    in_chunk = chunk * CHUNK + tl.arange(0, CHUNK)
    exits = tl.load(exit_mask + in_chunk * mask_stride, mask=in_chunk < num_rows, other=1)
    before = tl.sum(((exits == 0) & (in_chunk < first)).to(tl.int32), axis=0)
    if ONE_CHUNK:
        staying = tl.sum((exits == 0).to(tl.int32), axis=0)
    else:
        staying = tl.zeros((), tl.int32)
        for start in range(0, tl.cdiv(num_rows, CHUNK), CHUNK):
            chunks = start + tl.arange(0, CHUNK)
            found = tl.load(chunk_counts + chunks, mask=chunks * CHUNK < num_rows, other=0)
            staying += tl.sum(found, axis=0)
            before += tl.sum(tl.where(chunks < chunk, found, 0), axis=0)

    rows = first + tl.arange(0, ROWS)
    row_ok = rows < num_rows
    stays = tl.load(exit_mask + rows * mask_stride, mask=row_ok, other=1) == 0
    stayed_before = before + tl.cumsum(stays.to(tl.int32), axis=0) - stays.to(tl.int32)
    places = tl.where(stays, stayed_before, staying + rows - stayed_before)

    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    ok = row_ok[:, None] & (cols < size)[None, :]
    x = tl.load(hidden_states + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=ok)
    tl.store(rows_out + places[:, None] * size + cols[None, :], x, mask=ok)
    if tl.program_id(1) == 0:
        tl.store(indices + places, rows, mask=row_ok)
        if tl.program_id(0) == 0:
            tl.store(counts, staying)
            tl.store(counts + 1, num_rows - staying)


@triton.jit
def _scatter_kernel(
    rows_in,
    row_stride,
    col_stride,
    indices,
    index_stride,
    limit,
    out,
    out_row_stride,
    out_col_stride,
    num_rows,
    size,
    HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK columns of ROWS rows to `out`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if HAS_LIMIT:
        num_rows = tl.minimum(num_rows, tl.load(limit))
    row_ok = rows < num_rows
    places = tl.load(indices + rows * index_stride, mask=row_ok, other=0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    ok = row_ok[:, None] & (cols < size)[None, :]
    x = tl.load(rows_in + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=ok)
    tl.store(out + places[:, None] * out_row_stride + cols[None, :] * out_col_stride, x, mask=ok)


def _exit_compact_triton(hidden_states: Tensor, exit_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, size = hidden_states.shape
    rows, indices, counts = _exit_compact_fake(hidden_states, exit_mask)
    if num_rows == 0:
        return rows, indices, counts.zero_()
    exit_mask = exit_mask.view(torch.uint8)
    num_chunks = triton.cdiv(num_rows, CHUNK)
    chunk_counts = torch.empty(num_chunks, dtype=torch.int32, device=hidden_states.device)
    block = min(256, triton.next_power_of_2(max(1, size)))
    with on_device_of(hidden_states):
        if num_chunks > 1:
            _count_kernel[(num_chunks,)](exit_mask, exit_mask.stride(0), chunk_counts, num_rows, CHUNK=CHUNK)
        _compact_kernel[triton.cdiv(num_rows, ROWS), max(1, triton.cdiv(size, block))](
            hidden_states,
            *hidden_states.stride(),
            exit_mask,
            exit_mask.stride(0),
            chunk_counts,
            rows,
            indices,
            counts,
            num_rows,
            size,
            ONE_CHUNK=num_chunks == 1,
            CHUNK=CHUNK,
            ROWS=ROWS,
            BLOCK=block,
        )
    return rows, indices, counts


def _exit_compact_fake(hidden_states: Tensor, exit_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device, num_rows = hidden_states.device, hidden_states.shape[0]
    rows = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=device)
    indices = torch.empty(num_rows, dtype=torch.int64, device=device)
    return rows, indices, torch.empty(2, dtype=torch.int32, device=device)


def _exit_scatter_triton(rows: Tensor, indices: Tensor, out: Tensor, limit: Tensor | None) -> None:
    num_rows, size = rows.shape
    if num_rows == 0 or size == 0:
        return
    block = min(256, triton.next_power_of_2(size))
    with on_device_of(rows):
        _scatter_kernel[triton.cdiv(num_rows, ROWS), triton.cdiv(size, block)](
            rows,
            *rows.stride(),
            indices,
            indices.stride(0),
            limit,
            out,
            *out.stride(),
            num_rows,
            size,
            HAS_LIMIT=limit is not None,
            ROWS=ROWS,
            BLOCK=block,
        )


_exit_compact = register(
    "exit_compact(Tensor hidden_states, Tensor exit_mask) -> (Tensor, Tensor, Tensor)",
    _exit_compact_triton,
    _exit_compact_fake,
)
_exit_scatter = register(
    "exit_scatter(Tensor rows, Tensor indices, Tensor(a!) out, Tensor? limit) -> ()", _exit_scatter_triton, nothing
)


def exit_compact(hidden_states: Tensor, exit_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows stably: those that continue first, then those that exit. The host does not synchronise.

    Args:
        hidden_states: (N, D).
        exit_mask: (N,) bool, true where a row exits.

    Returns:
        (N, D) rows; (N,) int64 source index of each; (2,) int32 counts of continuing and exiting rows, on the device.

    Raises:
        ValueError: Shapes do not fit, or the mask is not bool.
    """
    require_rows("exit_compact", hidden_states, exit_mask)
    require(exit_mask.dtype == torch.bool, "exit_compact", f"a mask of {exit_mask.dtype}", "bool")
    return _exit_compact(hidden_states, exit_mask)


def exit_scatter(rows: Tensor, indices: Tensor, out: Tensor, limit: Tensor | None = None) -> Tensor:
    """Write `rows[i]` to `out[indices[i]]`.

    Args:
        rows: (M, D).
        indices: (M,) int64, without duplicates.
        out: (N, D) of the same dtype; changed in place.
        limit: (1,) int32 on the device, the number of rows to write; `None` for all.

    Returns:
        `out`.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    require_rows("exit_scatter", rows, indices)
    require_indices("exit_scatter", indices, limit)
    require(out.dtype == rows.dtype, "exit_scatter", f"out of {out.dtype}", f"{rows.dtype}, as the rows")
    require(out.dim() == 2 and out.shape[1] == rows.shape[1], "exit_scatter", f"out {tuple(out.shape)}", "(N, D)")
    _exit_scatter(rows, indices, out, limit)
    return out
