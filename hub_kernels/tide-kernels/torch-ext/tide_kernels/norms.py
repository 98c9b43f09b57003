"""Norms as models compute them: statistics in float32, rounded to the dtype where the model itself rounds."""

from __future__ import annotations

import triton
import triton.language as tl

# The variants of a norm, in the order of the codes that the ops take:
#   rms           round(weight * round(x / rms))       Llama and most others
#   rms_float32   round(weight * (x / rms))            OLMo 2, gpt-oss
#   rms_one_plus  round((1 + weight) * (x / rms))      Gemma
#   layer         round(weight * (x - mean) / std + bias)
NORMS = ("rms", "rms_float32", "rms_one_plus", "layer")


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """The float32 values `x`, rounded to the nearest that DTYPE has, ties to even; still float32.

    Done by hand for bfloat16, which Triton's interpreter truncates.
    """
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # noqa: PLR0124 (false for NaN)
    elif DTYPE == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def row_statistics(
    pointers, row_ok, col_stride, size, eps, NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean (0 except for LayerNorm) and reciprocal deviation of each row, (ROWS,) float32.

    `pointers` (ROWS,) point at the rows' first elements.
    """
    mean = tl.zeros((ROWS,), tl.float32)
    if NORM == 3:
        for start in range(0, size, BLOCK):
            cols = start + tl.arange(0, BLOCK).to(tl.int64)
            ok = row_ok[:, None] & (cols < size)[None, :]
            x = tl.load(pointers[:, None] + cols[None, :] * col_stride, mask=ok, other=0.0).to(tl.float32)
            mean += tl.sum(x, axis=1)
        mean = mean / size
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        ok = row_ok[:, None] & (cols < size)[None, :]
        x = tl.load(pointers[:, None] + cols[None, :] * col_stride, mask=ok, other=0.0).to(tl.float32)
        centred = tl.where(ok, x - mean[:, None], 0.0)
        squares += tl.sum(centred * centred, axis=1)
    return mean, tl.rsqrt(squares / size + eps)


@triton.jit
def normalized(x, mean, scale, weight, bias, cols, col_ok, NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A (ROWS, BLOCK) tile after the norm, float32, rounded as the model rounds; 0 where `col_ok` is false."""
    DTYPE: tl.constexpr = x.dtype
    WEIGHT_DTYPE: tl.constexpr = weight.dtype.element_ty
    w = tl.load(weight + cols, mask=col_ok, other=0.0).to(tl.float32)
    y = (x.to(tl.float32) - mean[:, None]) * scale[:, None]
    if NORM == 0:
        y = rounded(y, DTYPE) * w[None, :]
        if WEIGHT_DTYPE == DTYPE:  # where they differ, PyTorch multiplies, and leaves the result, in float32
            y = rounded(y, DTYPE)
    elif NORM == 2:
        y = rounded(y * (1.0 + w)[None, :], DTYPE)
    else:
        y = y * w[None, :]
        if HAS_BIAS:
            y += tl.load(bias + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        y = rounded(y, DTYPE)
    return tl.where(col_ok[None, :], y, 0.0)
