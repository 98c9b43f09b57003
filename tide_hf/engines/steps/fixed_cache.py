"""K/V buffers that stay where they are, for steps whose shapes and addresses may not change.

Every layer holds as many slots as the call can need, windows or not: the model's own masks hide what lies outside a
window, behind a padded prompt's start, or in front of the current token. Which slots a pass writes is a tensor on the
device, so taking tokens back is a smaller number, and what lies behind is written over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...depth.cache_slots import CacheSlots
from ...kernels.reference import kv_compact


class Cursor:
    """Where the pass that is running stands; shared by all layers.

    Attributes:
        start: () int64, the slot of its first token.
        slots: (width,) int64, the slots of its tokens.
    """

    start: Tensor
    slots: Tensor

    def move_to(self, start: Tensor, width: int) -> None:
        """Go to the slots from `start` on."""
        self.start = start
        self.slots = start + torch.arange(width, device=start.device)


class FixedLayer(CacheLayerMixin):
    """K/V of one layer, (rows, heads, capacity, head size) each."""

    is_compileable = True  # or transformers would leave the mask of a single token away
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, cursor: Cursor) -> None:
        super().__init__()
        self.keys, self.values, self.cursor = keys, values, cursor
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the K/V of a pass into its slots; return all slots."""
        self.keys.index_copy_(2, self.cursor.slots, key_states)
        self.values.index_copy_(2, self.cursor.slots, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All slots, from the first on."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        """() int64 on the device: the tokens in front of the pass that is running."""
        return self.cursor.start

    def get_max_length(self) -> int:
        """Slots."""
        return self.keys.shape[2]


def fixed_cache(like: Cache, rows: int, capacity: int) -> Cache:
    """Buffers for K/V such as a filled cache holds.

    Args:
        like: The cache.
        rows: Sequences.
        capacity: Slots of each.
    """
    cursor = Cursor()
    layers: Any = []
    with torch.inference_mode(False):  # calls inside and outside of it write to them
        for layer in like.layers:
            keys, values = (part.new_zeros((rows, part.shape[1], capacity, part.shape[3])) for part in _kv(layer))
            layers.append(FixedLayer(keys, values, cursor))
    return Cache(layers=layers)


def first_rows(cache: Cache, rows: int) -> Cache:
    """The first rows of buffers, as buffers of their own in the same memory."""
    cursor = Cursor()
    parts = [_kv(layer) for layer in cache.layers]
    layers: Any = [FixedLayer(keys[:rows], values[:rows], cursor) for keys, values in parts]
    return Cache(layers=layers)


def fixed_bytes(like: Cache, rows: int, capacity: int) -> int:
    """What [`fixed_cache`] would take."""
    parts = [part for layer in like.layers for part in _kv(layer)]
    return sum(rows * part.shape[1] * capacity * part.shape[3] * part.element_size() for part in parts)


def fill(cache: Cache, source: Cache, length: int) -> None:
    """Copy a cache of `length` tokens into a fixed one; dynamic layers with a window hold only the last of them.

    The fixed one may have more rows.
    """
    for fixed, layer in zip(cache.layers, source.layers, strict=True):
        for into, part in zip(_kv(fixed), _kv(layer), strict=True):
            stored = min(length, part.shape[2])
            into[: len(part), :, length - stored : length].copy_(part[:, :, :stored])


def take_rows(layer: Any, source: Any, length: int, rows: list[int]) -> None:
    """Copy the first `length` slots of some rows, ascending, into the first rows of a layer, which may be the same."""
    for into, part in zip(_kv(layer), _kv(source), strict=True):
        for row, taken in enumerate(rows):  # none is written over before it is read
            if into[row].data_ptr() != part[taken].data_ptr():
                into[row, :, :length] = part[taken, :, :length]


def give_back(cache: Cache, source: Cache, length: int) -> None:
    """Copy what [`fill`] took, and the tokens since, back into the dynamic cache; `length` tokens in all."""
    for fixed, layer in zip(cache.layers, source.layers, strict=False):
        any_layer: Any = layer
        start = 0
        if layer.is_sliding:
            start = max(0, length - any_layer.sliding_window + 1)
            any_layer.cumulative_length = length
        rows = len(any_layer.keys)
        layer.keys, layer.values = (part[:rows, :, start:length].clone() for part in _kv(fixed))


class FixedSlots(CacheSlots):
    """The slots of a batch's fixed cache. Its books are kept on the CPU, so nothing has to be read from the device.

    Args:
        cache: The fixed cache.
        length: Slots that are filled.
        attention_mask: (rows, length) of the prompt, on the CPU; `None` where nothing is padded.
        compaction_threshold: Share of holes that is put up with.
    """

    def __init__(self, cache: Cache, length: int, attention_mask: Tensor | None, compaction_threshold: float) -> None:
        super().__init__(cache, length, attention_mask, compaction_threshold, torch.device("cpu"))

    def make_room(self, width: int) -> bool:
        """Take holes away where `width` more slots would not fit; return whether they do now."""
        most = self.cache.layers[0].get_max_length()
        if self.length + width > most:
            self.settle()
        return self.length + width <= most

    def show(self, rows: list[int]) -> None:
        """Let each row hide what that of `rows` in its place has hidden so far."""
        if self.mask is not None:
            self.mask = self.mask[rows]
        if self.holes is not None:
            self.holes = self.holes[rows]

    def _crop(self, num_tokens: int) -> None:
        """Do nothing: what lies behind is written over."""

    def _move(self, order: Tensor, total: int) -> None:
        order = order.to(self.cache.layers[0].keys.device)  # once, since copies to a GPU wait for it
        for layer in self.cache.layers:
            keys, values = _kv(layer)
            for part, moved in zip((keys, values), kv_compact(keys, values, order), strict=True):
                part[:, :, : order.shape[1]].copy_(moved)


def _kv(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values
