"""Attention of many queries, such as a prompt's, compiled for this CPU.

PyTorch's attention can take a fourth of the time of a prompt of 240 tokens, and half of one of 2,000. This takes a
third to a half as long, and reads K/V that heads share where they are. Where PyTorch's is the faster, as it may be
where the CPU has instructions for products of matrices, that one is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...common.timing import least_seconds
from .compiled import is_loaded, load_op

LEAST_QUERIES = 32  # of a row; fewer are no faster than by PyTorch
PROBED_SHAPE = (1, 4, 1024, 64)  # rows, heads, queries, size
REPEATS = 2

# By dtype and threads.
_is_faster: dict[tuple[torch.dtype, int], bool] = {}


def attend_many(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
    """softmax(scale * query . key + mask) . value.

    Args:
        query: (rows, heads, queries, size).
        key: (rows, shared heads, slots, size).
        value: Shaped as `key`.
        mask: (rows or 1, 1, queries, slots), true where a query sees a slot; without one, as many slots as queries,
            and each sees its own and those before it.
        scale: 1 / sqrt(size) where it is `None`.

    Returns:
        (rows, queries, heads, size); `None` where there is no kernel yet, not for such tensors, or a slower one.
    """
    rows, heads, queries, size = query.shape
    shared, slots = key.shape[1:3]
    same = all(tensor.dtype is query.dtype and tensor.stride(-1) == 1 for tensor in (query, key, value))
    shapes = key.shape == value.shape == (rows, shared, slots, size) and heads % shared == 0
    if query.device.type != "cpu" or queries < LEAST_QUERIES or not (same and shapes):
        return None
    if not _sees(mask, rows, queries, slots) or not (has_kernel(query.dtype) and is_faster(query.dtype)):
        return None
    return _attended(query, key, value, mask, size**-0.5 if scale is None else scale)


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether there is a kernel already, by this process or an earlier one: nothing is compiled."""
    return is_loaded("many_queries", dtype)


def is_faster(dtype: torch.dtype) -> bool:
    """Whether there is a kernel, and it is faster than PyTorch's attention on this machine. Measured once."""
    key = dtype, torch.get_num_threads()
    if key not in _is_faster:
        _is_faster[key] = load_op("many_queries", dtype, _like) is not None and _measure(dtype)
    return _is_faster[key]


def _measure(dtype: torch.dtype) -> bool:
    one = torch.full(PROBED_SHAPE, 0.5, dtype=dtype, device="cpu")
    by_pytorch = least_seconds(lambda: scaled_dot_product_attention(one, one, one, is_causal=True), REPEATS)
    return least_seconds(lambda: _attended(one, one, one, None, 1.0), REPEATS) < by_pytorch


def _sees(mask: Tensor | None, rows: int, queries: int, slots: int) -> bool:
    """Whether a mask is one that the kernel reads."""
    if mask is None:
        return queries == slots
    one_for = mask.shape[0] in (1, rows) and mask.shape[1:] == (1, queries, slots)
    return one_for and mask.dtype is torch.bool


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    op: Any = load_op("many_queries", query.dtype, _like)
    return op(query, key, value, mask, scale)


def _like(query: Tensor, _key: Tensor, _value: Tensor, _mask: Tensor | None, _scale: float) -> Tensor:
    return query.new_empty(query.transpose(1, 2).shape)
