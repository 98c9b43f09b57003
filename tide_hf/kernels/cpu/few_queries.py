"""Attention of a few queries, compiled for this CPU.

For a few queries PyTorch's attention spends most of its time on starting products of matrices: 35 us in each layer of a
small model with 150 tokens behind it, half of which this takes. It adds up in the same order whatever the number of
queries is, so a pass over several tokens rounds as passes over one do.
"""

from __future__ import annotations

from torch import Tensor

from .compiled import load_op


def attend_few(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, end: Tensor, scale: float | None
) -> Tensor | None:
    """softmax(scale * query . key + mask) . value, over the slots that are filled.

    Args:
        query: (rows, heads, queries, size).
        key: (rows, heads, all slots, size).
        value: Shaped as `key`.
        mask: (rows or 1, 1, queries, all slots), numbers.
        end: () int64, how many slots are filled.
        scale: 1 / sqrt(size) where it is `None`.

    Returns:
        Shaped as `query`; `None` where there is no kernel, or not for such tensors.
    """
    rows, heads, queries, size = query.shape
    same = all(tensor.dtype is query.dtype and tensor.is_contiguous() for tensor in (key, value, mask))
    shapes = key.shape == value.shape == (rows, heads, mask.shape[-1], size) and mask.shape[1:3] == (1, queries)
    op = load_op("few_queries", query.dtype, _like) if same and shapes else None
    return None if op is None else op(query, key, value, mask, end, size**-0.5 if scale is None else scale)


def _like(query: Tensor, _key: Tensor, _value: Tensor, _mask: Tensor, _end: Tensor, _scale: float) -> Tensor:
    return query.new_empty(query.shape)
