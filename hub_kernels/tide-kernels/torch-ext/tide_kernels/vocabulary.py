"""`draft_top1`: the head's top-1 token, without its logits in memory."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from .registration import on_device_of, register, require

ROWS = 16  # the fewest that a matrix product of Triton takes
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter has no products of bfloat16


@triton.jit
def _block_top1_kernel(
    hidden_states,
    row_stride,
    col_stride,
    head_weight,
    token_stride,
    head_col_stride,
    head_bias,
    best,
    best_token,
    weight_sum,
    num_rows,
    vocab_size,
    size,
    num_blocks,
    HAS_BIAS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maximum, argmax and softmax denominator of the logits of ROWS rows and TOKENS tokens."""
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row_ok, token_ok = rows < num_rows, tokens < vocab_size
    logits = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK).to(tl.int64)
        col_ok = (cols < size)[None, :]
        at = rows[:, None] * row_stride + cols[None, :] * col_stride
        x = tl.load(hidden_states + at, mask=row_ok[:, None] & col_ok, other=0.0)
        at = tokens[:, None] * token_stride + cols[None, :] * head_col_stride
        w = tl.load(head_weight + at, mask=token_ok[:, None] & col_ok, other=0.0)
        if IN_FLOAT32:
            x, w = x.to(tl.float32), w.to(tl.float32)
        logits = tl.dot(x, tl.trans(w), logits, input_precision="ieee")
    if HAS_BIAS:
        logits += tl.load(head_bias + tokens, mask=token_ok, other=0.0).to(tl.float32)[None, :]
    logits = tl.where(logits == logits, logits, float("inf"))  # noqa: PLR0124 (NaN is the highest, as in PyTorch)
    logits = tl.where(token_ok[None, :], logits, float("-inf"))
    highest, place = tl.max(logits, axis=1, return_indices=True)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # not -inf - -inf
    total = tl.sum(tl.exp(logits - base[:, None]), axis=1)
    at = rows * num_blocks + tl.program_id(0)
    tl.store(best + at, highest, mask=row_ok)
    tl.store(best_token + at, tl.program_id(0) * TOKENS + place, mask=row_ok)
    tl.store(weight_sum + at, total, mask=row_ok)


@triton.jit
def _top1_kernel(best, best_token, weight_sum, top, log_probability, num_blocks, BLOCKS: tl.constexpr):
    """Reduce the blocks of one row. Of equal logits, the first wins."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    ok = blocks < num_blocks
    highest_of = tl.load(best + row * num_blocks + blocks, mask=ok, other=float("-inf"))
    highest, place = tl.max(highest_of, axis=0, return_indices=True)
    total = tl.load(weight_sum + row * num_blocks + blocks, mask=ok, other=0.0)
    total = tl.sum(total * tl.exp(highest_of - highest), axis=0)
    tl.store(top + row, tl.load(best_token + row * num_blocks + place).to(tl.int64))
    tl.store(log_probability + row, -tl.log(total))


def multiplies_halves(hidden_states: Tensor) -> bool:
    """Whether to multiply float16 or bfloat16. Triton does so on GPUs from Ampere on; before, it spills registers."""
    is_older = hidden_states.is_cuda and torch.cuda.get_device_capability(hidden_states.device) < (8, 0)
    return hidden_states.dtype != torch.float32 and not is_older


def _draft_top1_triton(hidden_states: Tensor, head_weight: Tensor, head_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    (num_rows, size), vocab_size = hidden_states.shape, head_weight.shape[0]
    top, log_probability = _draft_top1_fake(hidden_states)
    if num_rows == 0:
        return top, log_probability
    tokens, halves = 64, multiplies_halves(hidden_states)
    num_blocks = triton.cdiv(vocab_size, tokens)
    best, weight_sum = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=hidden_states.device)
    best_token = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=hidden_states.device)
    with on_device_of(hidden_states):
        _block_top1_kernel[num_blocks, triton.cdiv(num_rows, ROWS)](
            hidden_states,
            *hidden_states.stride(),
            head_weight,
            *head_weight.stride(),
            head_bias,
            best,
            best_token,
            weight_sum,
            num_rows,
            vocab_size,
            size,
            num_blocks,
            HAS_BIAS=head_bias is not None,
            IN_FLOAT32=INTERPRETED or not halves,
            ROWS=ROWS,
            TOKENS=tokens,
            BLOCK=min(128 if halves else 32, max(16, triton.next_power_of_2(size))),
        )
        blocks = triton.next_power_of_2(num_blocks)
        _top1_kernel[(num_rows,)](best, best_token, weight_sum, top, log_probability, num_blocks, BLOCKS=blocks)
    return top, log_probability


def _draft_top1_fake(hidden_states: Tensor, *_args: object) -> tuple[Tensor, Tensor]:
    num_rows, device = hidden_states.shape[0], hidden_states.device
    top = torch.empty(num_rows, dtype=torch.int64, device=device)
    return top, torch.empty(num_rows, dtype=torch.float32, device=device)


_draft_top1 = register(
    "draft_top1(Tensor hidden_states, Tensor head_weight, Tensor? head_bias) -> (Tensor, Tensor)",
    _draft_top1_triton,
    _draft_top1_fake,
)


def draft_top1(hidden_states: Tensor, head_weight: Tensor, head_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the head's top-1 token of each row and its log-probability, without writing the logits.

    Args:
        hidden_states: (N, D), after the final norm; float32, float16 or bfloat16.
        head_weight: (V, D), of the same dtype.
        head_bias: (V,) or `None`.

    Returns:
        (N,) int64 tokens, the first where several are equal, and (N,) float32 log-probabilities.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the vocabulary is empty.
    """
    fits = hidden_states.dim() == head_weight.dim() == 2 and hidden_states.shape[1] == head_weight.shape[1]
    shapes = [tuple(tensor.shape) for tensor in (hidden_states, head_weight)]
    require(fits and head_weight.shape[0] > 0, "draft_top1", f"shapes {shapes}", "(N, D) and (V, D)")
    dtypes = hidden_states.dtype, head_weight.dtype
    require(dtypes[0] == dtypes[1], "draft_top1", f"{dtypes[0]} states and a {dtypes[1]} head", "one dtype")
    return _draft_top1(hidden_states, head_weight, head_bias if head_bias is None else head_bias.contiguous())
