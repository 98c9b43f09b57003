"""`exit_project`: rows back to their places, through the final norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .norms import NORMS, normalized, rounded, row_statistics
from .registration import nothing, on_device_of, register, require, require_places, require_rows


@triton.jit
def _project_kernel(
    rows_in,
    row_stride,
    col_stride,
    indices,
    index_stride,
    limit,
    out,
    out_row_stride,
    out_col_stride,
    norm_weight,
    norm_bias,
    num_rows,
    size,
    eps,
    HAS_LIMIT: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one row and write it to its place."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    if HAS_LIMIT:
        num_rows = tl.minimum(num_rows, tl.load(limit))
    row_ok = rows < num_rows
    places = tl.load(indices + rows * index_stride, mask=row_ok, other=0)
    pointers = rows_in + rows * row_stride
    mean, scale = row_statistics(pointers, row_ok, col_stride, size, eps, NORM, 1, BLOCK)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        col_ok = cols < size
        ok = row_ok[:, None] & col_ok[None, :]
        x = tl.load(pointers[:, None] + cols[None, :] * col_stride, mask=ok, other=0.0)
        y = normalized(x, mean, scale, norm_weight, norm_bias, cols, col_ok, NORM, HAS_NORM_BIAS)
        y = rounded(y, out.dtype.element_ty)
        tl.store(out + places[:, None] * out_row_stride + cols[None, :] * out_col_stride, y, mask=ok)


def _exit_project_triton(
    rows: Tensor,
    indices: Tensor,
    out: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    norm: int,
    limit: Tensor | None,
) -> None:
    num_rows, size = rows.shape
    if num_rows == 0 or size == 0:
        return
    with on_device_of(rows):
        _project_kernel[(num_rows,)](
            rows,
            *rows.stride(),
            indices,
            indices.stride(0),
            limit,
            out,
            *out.stride(),
            norm_weight,
            norm_bias,
            num_rows,
            size,
            eps,
            HAS_LIMIT=limit is not None,
            NORM=norm,
            HAS_NORM_BIAS=norm_bias is not None,
            BLOCK=min(2048, triton.next_power_of_2(size)),
        )


_exit_project = register(
    "exit_project(Tensor rows, Tensor indices, Tensor(a!) out, Tensor norm_weight, Tensor? norm_bias, float eps, "
    "int norm, Tensor? limit) -> ()",
    _exit_project_triton,
    nothing,
)


def exit_project(
    rows: Tensor,
    indices: Tensor,
    out: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None = None,
    *,
    eps: float,
    norm: str = "rms",
    limit: Tensor | None = None,
) -> Tensor:
    """`exit_scatter` with the final norm on the way.

    Args:
        rows: (M, D), before the norm.
        indices: As in `exit_scatter`.
        out: As in `exit_scatter`.
        norm_weight: As in `norm_route`.
        norm_bias: As in `norm_route`.
        eps: As in `norm_route`.
        norm: As in `norm_route`.
        limit: As in `exit_scatter`.

    Returns:
        `out`.

    Raises:
        ValueError: Shapes or dtypes do not fit, or there is no such norm.
    """
    require_rows("exit_project", rows, indices)
    require_places("exit_project", indices, limit)
    require(norm in NORMS, "exit_project", f"norm={norm!r}", f"one of {NORMS}")
    require(out.dtype == rows.dtype, "exit_project", f"out of {out.dtype}", f"{rows.dtype}, as the rows")
    fits = out.dim() == 2 and out.shape[1] == rows.shape[1] == norm_weight.numel()
    require(fits, "exit_project", f"out {tuple(out.shape)}, norm {tuple(norm_weight.shape)}", "(N, D), (D,)")
    bias = norm_bias if norm_bias is None else norm_bias.contiguous()
    _exit_project(rows, indices, out, norm_weight.contiguous(), bias, eps, NORMS.index(norm), limit)
    return out
