"""Attention on CPUs, in C++ compiled for this CPU: decode over a static cache, and prefill.

Decode: with few queries PyTorch's attention spends most of its time starting matrix products, 35 us in each layer of a
small model with 150 cached tokens, twice the time of this kernel. The kernel sums in the same order for any number of
queries, so a pass over several tokens rounds as passes over single tokens do.

Prefill: PyTorch's attention can take a quarter of the time to prefill 240 tokens, and half for 2,000. This kernel takes
a third to a half as long, and reads the K/V of grouped query heads (GQA) without repeating them. PyTorch's attention is
used where it measures faster, as it may be on CPUs with matrix instructions (AMX).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...common.measurements import measured
from ...common.timing import least_seconds
from .cpp_kernels import are_ready, load_op

MIN_QUERIES = 32  # of a prefill, per row; with fewer queries, PyTorch's attention is as fast
PROBED_SHAPE = (1, 4, 1024, 64)  # rows, heads, queries, size
REPEATS = 2

# Whether the prefill kernel is faster than PyTorch's attention, by dtype and number of threads.
_is_faster: dict[tuple[torch.dtype, int], bool] = {}


def decode_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, end: Tensor, scale: float | None
) -> Tensor | None:
    """softmax(scale * query . key + mask) . value, over the first `end` slots of a static cache.

    Query (rows, heads, queries, size), key and value (rows, heads, slots, size), additive mask (rows or 1, 1, queries,
    slots), `end` () int64; the scale defaults to 1 / sqrt(size). Returns a tensor shaped as the query; `None` if
    there is no kernel for these tensors.
    """
    rows, heads, queries, size = query.shape
    same = all(tensor.dtype is query.dtype and tensor.is_contiguous() for tensor in (key, value, mask))
    shapes = key.shape == value.shape == (rows, heads, mask.shape[-1], size) and mask.shape[1:3] == (1, queries)
    op = load_op("decode_attention", query.dtype) if same and shapes else None
    return None if op is None else op(query, key, value, mask, end, size**-0.5 if scale is None else scale)


def prefill_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
    """softmax(scale * query . key) . value over the slots that a mask lets queries attend to.

    Query (rows, heads, queries, size), key and value (rows, KV heads, slots, size), mask (rows or 1, 1, queries, slots)
    bool; without a mask, attention is causal over as many slots as queries. The scale defaults to 1 / sqrt(size).
    Returns (rows, queries, heads, size); `None` if no kernel is loaded, these tensors do not suit it, or it is
    slower than PyTorch's attention.
    """
    rows, heads, queries, size = query.shape
    kv_heads, slots = key.shape[1:3]
    same = all(tensor.dtype is query.dtype and tensor.stride(-1) == 1 for tensor in (query, key, value))
    shapes = key.shape == value.shape == (rows, kv_heads, slots, size) and heads % kv_heads == 0
    if query.device.type != "cpu" or queries < MIN_QUERIES or not (same and shapes):
        return None
    if not _supports_mask(mask, rows, queries, slots):
        return None
    if not (are_ready(query.dtype) and is_faster(query.dtype)):
        return None
    return _prefill(query, key, value, mask, size**-0.5 if scale is None else scale)


def is_faster(dtype: torch.dtype) -> bool:
    """Whether there is a prefill kernel that is faster than PyTorch's attention on this machine."""
    key = dtype, torch.get_num_threads()
    if key not in _is_faster:
        _is_faster[key] = load_op("prefill_attention", dtype) is not None and _measured(dtype)
    return _is_faster[key]


def _measured(dtype: torch.dtype) -> bool:
    by_kernel, by_pytorch = measured(f"prefill attention, {dtype}", 2, lambda: _measure(dtype))
    return by_kernel < by_pytorch


def _measure(dtype: torch.dtype) -> list[float]:
    """Seconds of the kernel and of PyTorch's attention."""
    one = torch.full(PROBED_SHAPE, 0.5, dtype=dtype, device="cpu")
    by_kernel = least_seconds(lambda: _prefill(one, one, one, None, 1.0), REPEATS)
    return [by_kernel, least_seconds(lambda: scaled_dot_product_attention(one, one, one, is_causal=True), REPEATS)]


def _supports_mask(mask: Tensor | None, rows: int, queries: int, slots: int) -> bool:
    if mask is None:
        return queries == slots
    fits = mask.shape[0] in (1, rows) and mask.shape[1:] == (1, queries, slots)
    return fits and mask.dtype is torch.bool


def _prefill(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    op: Any = load_op("prefill_attention", query.dtype)
    return op(query, key, value, mask, scale)
