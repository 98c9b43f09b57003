"""A static KV cache, for steps whose shapes and addresses must not change.

Every layer holds as many slots as the call may need, sliding window or not: the model's own masks hide slots outside
the window, padding, and unfilled slots. The indices of the slots that a pass writes are on the device, so a rollback
only sets a lower start, and the next pass overwrites the rejected slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...depth.kv_cache import CacheSlots
from ...kernels.reference import kv_compact


@dataclass(frozen=True)
class FilledCache:
    """K/V that a static cache is like, and takes.

    Attributes:
        cache: A cache of all layers, dynamic or static.
        length: Its number of tokens.
        is_spare: Whether nobody else needs its memory, which then goes layer by layer as the static cache takes K/V.
    """

    cache: Cache
    length: int
    is_spare: bool = False

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(part.nbytes for layer in self.cache.layers for part in _kv(layer))


class CachePosition:
    """The position of the running pass in the cache; shared by all layers."""

    start: Tensor  # () int64, the slot of the pass's first token
    slots: Tensor  # (width,) int64, the slots of the pass's tokens
    # The number of slots that are filled once the pass has stored its K/V: on a CPU () int64, on other devices (width,)
    # int32 after each of its tokens, as attention reads it in every layer.
    end: Tensor

    def move_to(self, start: Tensor, width: int) -> None:
        """Move to the `width` slots from `start` on."""
        self.start = start
        self.slots = start + torch.arange(width, device=start.device)
        if start.device.type == "cpu":
            self.end = start + width
        else:
            self.end = start + torch.arange(1, width + 1, dtype=torch.int32, device=start.device)


class StaticKVLayer(CacheLayerMixin):
    """K/V of one layer, (rows, heads, capacity, head size) each."""

    is_compileable = True  # otherwise transformers would omit the mask for a single token
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, position: CachePosition) -> None:
        super().__init__()
        self.keys, self.values, self.position = keys, values, position
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, since the buffers exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the K/V of a pass into its slots; return all slots."""
        self.keys.index_copy_(2, self.position.slots, key_states)
        self.values.index_copy_(2, self.position.slots, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of slots that masks cover, which is all, and the index of the first slot."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        """() int64 on the device, the number of tokens before the running pass."""
        return self.position.start

    def get_max_length(self) -> int:
        """The number of slots."""
        return self.keys.shape[2]


def static_cache(like: FilledCache, rows: int, capacity: int) -> Cache:
    """Allocate a static cache with the K/V heads, head sizes and dtypes of a filled cache; take K/V that are spare."""
    position = CachePosition()
    layers: Any = []
    for layer in like.cache.layers:
        with torch.inference_mode(False):  # so that passes outside of inference mode can write too
            keys, values = (part.new_zeros((rows, part.shape[1], capacity, part.shape[3])) for part in _kv(layer))
            layers.append(StaticKVLayer(keys, values, position))
        if like.is_spare:
            _take(layers[-1], layer, like)
    return Cache(layers=layers)


def first_rows(cache: Cache, rows: int) -> Cache:
    """A view of the first rows of a static cache, in the same memory."""
    position = CachePosition()
    parts = [_kv(layer) for layer in cache.layers]
    layers: Any = [StaticKVLayer(keys[:rows], values[:rows], position) for keys, values in parts]
    return Cache(layers=layers)


def static_cache_bytes(like: FilledCache, rows: int, capacity: int) -> int:
    """The bytes that [`static_cache`] would allocate."""
    parts = [part for layer in like.cache.layers for part in _kv(layer)]
    return sum(rows * part.shape[1] * capacity * part.shape[3] * part.element_size() for part in parts)


def fill(cache: Cache, source: FilledCache) -> None:
    """Copy K/V into a static cache, which may have more rows, unless it has taken them already."""
    for fixed, layer in zip(cache.layers, source.cache.layers, strict=True):
        _take(fixed, layer, source)


def _take(fixed: Any, layer: Any, source: FilledCache) -> None:
    """Copy the K/V of a layer into one of a static cache; if they are spare, let the layer show them there."""
    shown = []
    for into, part in zip(_kv(fixed), _kv(layer), strict=True):
        stored = min(source.length, part.shape[2])  # dynamic sliding-window layers hold only the last tokens
        shown.append(into[: len(part), :, source.length - stored : source.length])
        if shown[-1].data_ptr() != part.data_ptr():
            shown[-1].copy_(part[:, :, :stored])
    if source.is_spare:
        layer.keys, layer.values = shown


def take_rows(layer: Any, source: Any, length: int, rows: list[int]) -> None:
    """Copy `length` slots of `rows` (ascending) from `source` to the first rows of `layer`; both may be the same."""
    for into, part in zip(_kv(layer), _kv(source), strict=True):
        for row, taken in enumerate(rows):  # ascending, so no row is overwritten before it is read
            if into[row].data_ptr() != part[taken].data_ptr():
                into[row, :, :length] = part[taken, :, :length]


def copy_back(cache: Cache, source: Cache, length: int) -> None:
    """Copy a static cache of `length` tokens back into the dynamic cache that [`fill`] copied from."""
    for fixed, layer in zip(cache.layers, source.layers, strict=False):
        any_layer: Any = layer
        start = 0
        if layer.is_sliding:
            start = max(0, length - any_layer.sliding_window + 1)
            any_layer.cumulative_length = length
        rows = len(any_layer.keys)
        layer.keys, layer.values = (part[:rows, :, start:length].clone() for part in _kv(fixed))


class StaticCacheSlots(CacheSlots):
    """The slots of a batch's static cache, tracked without device reads: `device`, of masks, is the CPU."""

    def make_room(self, width: int) -> bool:
        """Compact the cache if `width` more slots would not fit; return whether they fit afterwards."""
        most = self.cache.layers[0].get_max_length()
        if self.length + width > most:
            self.compact()
        return self.length + width <= most

    def select_rows(self, rows: list[int]) -> None:
        """Set the mask and rejected slots of each row `i` to those of row `rows[i]`."""
        if self.mask is not None:
            self.mask = self.mask[rows]
        if self.rejected is not None:
            self.rejected = self.rejected[rows]
            self._num_tokens = [self._num_tokens[row] for row in rows]

    def _crop(self, num_tokens: int) -> None:
        """Do nothing, since the next pass overwrites the slots."""

    def _written(self, layer: Any, width: int) -> tuple[Tensor, Tensor]:
        written = slice(self.length, self.length + width)
        return layer.keys[:, :, written], layer.values[:, :, written]

    def _move(self, order: Tensor, total: int) -> None:
        order = order.to(self.cache.layers[0].keys.device)  # uploaded once, since each upload synchronises with the GPU
        for layer in self.cache.layers:
            keys, values = _kv(layer)
            for part, moved in zip((keys, values), kv_compact(keys, values, order), strict=True):
                part[:, :, : order.shape[1]].copy_(moved)


def _kv(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values
