"""Attention of a few queries, compiled for this CPU.

For a few queries PyTorch's attention spends most of its time on starting products of matrices: 35 us in each layer of a
small model with 150 tokens behind it, half of which this takes. It adds up in the same order whatever the number of
queries is, so a pass over several tokens rounds as passes over one do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_kernels import load_kernel

LEAST_PER_THREAD = 8192  # values of the keys, times queries; for fewer, waiting for another thread takes longer
ARGUMENTS = (*["const Value*"] * 4, "Value*", *["int64_t"] * 8, "float")


def attend_few(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, slots: int, scale: float | None
) -> Tensor | None:
    """softmax(scale * query . key + mask) . value, over the first `slots` slots.

    Args:
        query: (rows, heads, queries, size).
        key: (rows, heads, all slots, size).
        value: Shaped as `key`.
        mask: (rows or 1, 1, queries, all slots), numbers.
        slots: How many are filled.
        scale: 1 / sqrt(size) where it is `None`.

    Returns:
        Shaped as `query`; `None` where there is no kernel, or not for such tensors.
    """
    kernel = load_kernel("few_queries", query.dtype, ARGUMENTS)
    rows, heads, queries, size = query.shape
    same = all(tensor.dtype is query.dtype and tensor.is_contiguous() for tensor in (key, value, mask))
    shapes = key.shape == value.shape == (rows, heads, mask.shape[-1], size) and mask.shape[1:3] == (1, queries)
    if kernel is None or not (same and shapes):
        return None
    output = query.new_empty(query.shape)
    threads = min(torch.get_num_threads(), 1 + query.numel() * slots // LEAST_PER_THREAD)
    scale = size**-0.5 if scale is None else scale
    sizes = (rows, heads, queries, size, mask.shape[-1], slots, len(mask) > 1)
    kernel(query.contiguous(), key, value, mask, output, *sizes, threads, scale)
    return output
