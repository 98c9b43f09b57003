"""`kv_compact`: gather the slots of a KV cache that are kept, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .registration import nothing, on_device_of, register, require

SLOTS = 64  # slots that one program moves at a time


@triton.jit
def _move_block(
    base,
    slot_stride,
    element_stride,
    order,
    order_stride,
    first,
    width,
    elements,
    element_ok,
    LEFT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Move one block of slots, apart from those that stay or move the other way."""
    slots = first + tl.arange(0, SLOTS)
    source = tl.load(order + slots * order_stride, mask=slots < width, other=-1)
    moves = (source >= 0) & ((source > slots) if LEFT else (source < slots))
    ok = moves[:, None] & element_ok[None, :]
    at = elements[None, :].to(tl.int64) * element_stride
    x = tl.load(base + source[:, None] * slot_stride + at, mask=ok)
    tl.debug_barrier()  # a slot is read by one thread before another writes to it
    tl.store(base + slots[:, None].to(tl.int64) * slot_stride + at, x, mask=ok)
    tl.debug_barrier()


@triton.jit
def _move_slots(
    base, slot_stride, element_stride, order, order_stride, width, size, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Move the slots of one row and head, BLOCK elements of each.

    Sources ascend, so a slot that moves right never overwrites the source of one that moves left, nor the reverse.
    Slots that move right are moved in descending order and the others in ascending order, so that every source is read
    before it is overwritten.
    """
    elements = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    element_ok = elements < size
    num_blocks = tl.cdiv(width, SLOTS)
    for i in range(0, num_blocks):
        first = (num_blocks - 1 - i) * SLOTS
        _move_block(
            base, slot_stride, element_stride, order, order_stride, first, width, elements, element_ok, False, SLOTS
        )
    for i in range(0, num_blocks):
        first = i * SLOTS
        _move_block(
            base, slot_stride, element_stride, order, order_stride, first, width, elements, element_ok, True, SLOTS
        )


@triton.jit
def _kv_compact_kernel(
    keys,
    key_row_stride,
    key_head_stride,
    key_slot_stride,
    key_element_stride,
    values,
    value_row_stride,
    value_head_stride,
    value_slot_stride,
    value_element_stride,
    order,
    order_row_stride,
    order_stride,
    num_key_heads,
    width,
    key_size,
    value_size,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: a row, a head of K or of V, BLOCK elements."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    order += row * order_row_stride
    if head < num_key_heads:
        base = keys + row * key_row_stride + head * key_head_stride
        _move_slots(base, key_slot_stride, key_element_stride, order, order_stride, width, key_size, SLOTS, BLOCK)
    else:
        base = values + row * value_row_stride + (head - num_key_heads) * value_head_stride
        _move_slots(base, value_slot_stride, value_element_stride, order, order_stride, width, value_size, SLOTS, BLOCK)


def _kv_compact_triton(keys: Tensor, values: Tensor, order: Tensor) -> None:
    (num_rows, width), largest = order.shape, max(keys.shape[3], values.shape[3])
    num_heads = keys.shape[1] + values.shape[1]
    if num_rows * width * num_heads * largest == 0:
        return
    block = min(64, triton.next_power_of_2(largest))
    with on_device_of(keys):
        _kv_compact_kernel[num_rows, num_heads, triton.cdiv(largest, block)](
            keys,
            *keys.stride(),
            values,
            *values.stride(),
            order,
            *order.stride(),
            keys.shape[1],
            width,
            keys.shape[3],
            values.shape[3],
            SLOTS=SLOTS,
            BLOCK=block,
        )


_kv_compact = register(
    "kv_compact(Tensor(a!) keys, Tensor(b!) values, Tensor order) -> ()", _kv_compact_triton, nothing
)


def kv_compact(keys: Tensor, values: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Move slot `order[row, i]` of every head to slot `i`, in place.

    Args:
        keys: (rows, heads, slots, key size); written to.
        values: (rows, heads, slots, value size), of as many slots; written to.
        order: (rows, kept) int64, ascending along each row, except for -1 where the slot's contents do not matter.

    Returns:
        `keys` and `values` of the first `kept` slots, as views.

    Raises:
        ValueError: Shapes do not fit.
    """
    fits = keys.dim() == values.dim() == 4 and order.dim() == 2 and keys.shape[2] == values.shape[2]
    fits = fits and keys.shape[0] == values.shape[0] == order.shape[0] and order.shape[1] <= keys.shape[2]
    shapes = [tuple(tensor.shape) for tensor in (keys, values, order)]
    require(fits, "kv_compact", f"shapes {shapes}", "(rows, heads, slots, size) twice, and (rows, kept)")
    if not torch.compiler.is_compiling():
        require(order.dtype == torch.int64, "kv_compact", f"order of {order.dtype}", "int64")
    _kv_compact(keys, values, order)
    width = order.shape[1]
    return keys[:, :, :width], values[:, :, :width]
