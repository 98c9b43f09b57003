"""Attention over a static cache on a GPU, which reads the number of filled slots on the device.

PyTorch's FlashAttention takes that number as a tensor, so a captured step needs no mask, and reads filled slots alone.
Called by itself on an H100 it takes 42 to 89 us where attention with a mask takes 78 to 230, for 256 to 4,096 slots.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FLASH_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
MANY_SLOTS = 2048  # beyond which each token of a pass is a sequence of its own, and reads K/V again
PROBE = {"heads": 4, "kv_heads": 2, "width": 3}
TOLERANCE = 0.03  # of values below 4, in half precision

aten = torch.ops.aten


def flash_decode(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the last tokens of one row; check [`can_flash_decode`] first.

    Args:
        query: (1, heads, width, size), of the tokens in the last filled slots.
        key: (1, KV heads, slots, size).
        value: As `key`.
        ends: (width,) int32, the number of filled slots once each token's are.
        scale: Of the scores; default: 1 / sqrt(size).

    Returns:
        (1, width, heads, size).
    """
    # For several tokens of a sequence FlashAttention 2 has one block read all slots of a head, for a single one, where
    # query heads share K/V, many blocks that read a part each.
    may_split = key.shape[2] > MANY_SLOTS and query.shape[1] > key.shape[1]
    splits = may_split and can_split(query.device, query.dtype, query.shape[-1])
    return _attend(query, key, value, ends, scale, query.shape[2] if splits else 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None, sequences: int) -> Tensor:
    bounds = _bounds(query.device, query.shape[2], key.shape[2], sequences)
    found: Tensor = torch.ops.tide_hf.flash_decode(query, key, value, ends[-sequences:], *bounds, scale)
    return found


@cache
def can_flash_decode(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether heads of this size can be attended to so on a device: where that gives what masked attention gives."""
    if device.type != "cuda" or dtype not in FLASH_DTYPES or size > MAX_HEAD_SIZE or size % 8:
        return False
    can_split(device, dtype, size)  # asked now, since a probe cannot run while a step is captured
    return _gives_the_same(device, dtype, size, slots=96, filled=40, sequences=1)


@cache
def can_split(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether each token of a pass may be a sequence of its own, likewise."""
    filled = MANY_SLOTS + 40
    return _gives_the_same(device, dtype, size, slots=2 * MANY_SLOTS, filled=filled, sequences=PROBE["width"])


def _gives_the_same(
    device: torch.device, dtype: torch.dtype, size: int, slots: int, filled: int, sequences: int
) -> bool:
    heads, kv_heads, width = PROBE.values()
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, width, size), *[(1, kv_heads, slots, size)] * 2)
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    ends = torch.arange(filled - width + 1, filled + 1, dtype=torch.int32, device=device)
    mask = torch.arange(slots, device=device) < ends[:, None]
    try:
        found = _attend(query, key, value, ends, None, sequences)
    except RuntimeError:  # this build or GPU has no such kernel
        return False
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    return torch.allclose(found.float(), expected.float(), atol=TOLERANCE, rtol=0.0)


@cache
@torch.inference_mode(False)  # graphs keep them
def _bounds(device: torch.device, width: int, slots: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Where each sequence's queries and slots begin and end, (sequences + 1,) int32 each.

    Several sequences, of one token each, read the same slots: all begin at the first one, and their lengths end them.
    """
    query_ends = range(0, width + 1, width // sequences)
    slot_ends = [0, slots] if sequences == 1 else [0] * (sequences + 1)
    return tuple(torch.tensor(ends, dtype=torch.int32, device=device) for ends in (query_ends, slot_ends))  # type: ignore[return-value]


# An op of its own, so that a trace needs to know no more of PyTorch's than the shape of its result.
_ops = torch.library.Library("tide_hf", "FRAGMENT")
_ops.define(
    "flash_decode(Tensor query, Tensor key, Tensor value, Tensor lengths, Tensor query_ends, Tensor slot_ends, "
    "float? scale) -> Tensor"
)


def _flash_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    query_ends: Tensor,
    slot_ends: Tensor,
    scale: float | None,
) -> Tensor:
    tokens, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    sizes: Any = (query.shape[2] // len(lengths), key.shape[2])
    # Without dropout, causal from the last filled slot on, without a mask for debugging.
    options = (*sizes, 0.0, True, False)
    output = aten._flash_attention_forward(
        tokens, keys, values, query_ends, slot_ends, *options, scale=scale, seqused_k=lengths
    )[0]
    return output[None]


def _fake_flash_decode(query: Tensor, *_: Any) -> Tensor:
    rows, heads, width, size = query.shape
    return query.new_empty((rows, width, heads, size))


_ops.impl("flash_decode", _flash_decode, "CompositeExplicitAutograd")
torch.library.register_fake("tide_hf::flash_decode", _fake_flash_decode, lib=_ops)
