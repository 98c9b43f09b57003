"""The K/V cache under early exit and speculation: which caches can be used, and rollback of rejected tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging import version
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    QuantizedCache,
    StaticLayer,
)

from ..base_model.structure import CACHE
from ..common.errors import UnsupportedOptionError
from ..kernels.ops import WITHOUT_KERNELS, Ops
from ..kernels.reference import kv_compact

SPARE_SLOTS = 64  # in a buffer of K/V, when it grows


class GrowingLayer(DynamicLayer):
    """K/V of one layer in a buffer with spare slots. Concatenation, as in the base class, copies all K/V in each step.

    Copying took a quarter of the time of a step with 64 rows on a CPU.
    """

    keys: Any
    values: Any
    _buffers: tuple[Tensor, ...] = ()

    @classmethod
    def like(cls, layer: DynamicLayer) -> GrowingLayer:
        """A layer with the K/V of another."""
        found = cls()
        if layer.is_initialized:
            found.update(layer.keys, layer.values)
        return found

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append K/V, (rows, heads, tokens, head size) each; return all."""
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        for buffer, added in zip(self.with_room(key_states), (key_states, value_states), strict=True):
            buffer[:, :, start:end] = added
        return self.show(end)

    def with_room(self, like: Tensor) -> tuple[Tensor, ...]:
        """The buffers of keys and values, with slots for as many further ones as `like` has; see `update`."""
        if not self.is_initialized:
            self.lazy_initialization(like, like)
        length, (rows, heads, count, size) = self.get_seq_length(), like.shape
        if not self._buffers or length + count > self._buffers[0].shape[-2]:
            self._buffers = like.new_empty(2, rows, heads, length + count + SPARE_SLOTS, size).unbind()
            for buffer, part in zip(self._buffers, (self.keys, self.values), strict=True):
                if length:
                    buffer[:, :, :length] = part
        return self._buffers

    def show(self, length: int) -> tuple[Tensor, Tensor]:
        """Take the first `length` slots as filled; return their keys and values."""
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`."""
        length = self.get_seq_length()
        self._buffers = tuple(buffer[indices] for buffer in self._buffers)
        self.show(length)


@contextmanager
def kv_in_float32(cache: Any, dtype: torch.dtype, is_returned: bool) -> Iterator[None]:
    """The context in which a call's K/V are in float32; a cache that is returned has them in the model's `dtype`."""
    _convert(cache, torch.float32)
    try:
        yield
    finally:
        if is_returned:
            _convert(cache, dtype)


def _convert(cache: Any, dtype: torch.dtype) -> None:
    for layer in getattr(cache, "layers", ()):
        if isinstance(getattr(layer, "keys", None), Tensor) and layer.keys.is_floating_point():
            layer.keys, layer.values, layer.dtype = layer.keys.to(dtype), layer.values.to(dtype), dtype


def find_cache(model_kwargs: dict[str, Any], user: str, *, takes_static: bool, moves_rows: bool = False) -> Cache:
    """Return the call's cache; raise if the feature named `user` cannot use this cache.

    `takes_static` tells whether the feature supports static caches (without sliding windows), `moves_rows` whether it
    compacts the rows of a batch.
    """
    cache: Any = model_kwargs.get(CACHE) if model_kwargs.get("use_cache", True) else None
    got = type(cache).__name__ if cache is not None else "no cache (use_cache=False)"
    has_encoder = model_kwargs.get("encoder_hidden_states") is not None
    got += " beside an encoder's" if has_encoder else ""
    supported = isinstance(cache, Cache) and not isinstance(cache, QuantizedCache | EncoderDecoderCache)
    supported = supported and not has_encoder
    if supported and any(isinstance(layer, StaticLayer) for layer in cache.layers):
        got += " with sliding-window layers" if any(cache.is_sliding) else ""
        supported = takes_static and not any(cache.is_sliding)
    if supported and any(getattr(layer, "record_past", False) for layer in cache.layers):
        got += " that records the past"  # the first rollback would discard the record
        supported = False
    if supported and moves_rows and (others := [layer for layer in cache.layers if type(layer) not in MOVABLE]):
        got += f" with a {type(others[0]).__name__}"
        supported = False
    if not supported:
        also = ", or a StaticCache without sliding windows" if takes_static else ""
        raise UnsupportedOptionError(
            f"{user} cannot use this cache",
            got=got,
            expected=f"a DynamicCache, which is the default of generate(){also}",
            do="Leave cache_implementation and use_cache at their defaults, call activate_past_recording() "
            "afterwards, or detach TIDE for this call.",
        )
    return cache


def add_layers(cache: Any, config: Any) -> None:
    """Give a `DynamicCache()`, made without a config, the layers that it would add while it is filled.

    Where layers share K/V, as in Gemma 4, it stays as it is.
    """
    if type(cache) is DynamicCache and not cache.layers and not getattr(config, "num_kv_shared_layers", 0):
        cache.layers.extend(DynamicLayer() for _ in range(config.num_hidden_layers))


def last_slot(cache: Cache) -> int | None:
    """Number of slots of a static cache; `None` for a dynamic cache."""
    return min((layer.get_max_length() for layer in cache.layers if isinstance(layer, StaticLayer)), default=None)


def crop(layer: Any, num_tokens: int) -> None:
    """Remove the last `num_tokens` tokens from one layer of a cache.

    Even if `num_tokens` is 0, a sliding-window layer drops the tokens that have left its window.
    """
    if isinstance(layer, StaticLayer) and not hasattr(layer, "crop"):  # as in transformers 5.17 and 5.18
        for name, length in vars(layer).items():
            if name.endswith("cumulative_length"):  # an attention indexer has its own counter
                length.sub_(num_tokens)  # in place; the next pass overwrites the rejected slots
    elif getattr(layer, "is_initialized", True):  # layers that attend to images stay empty without images
        layer.crop(-num_tokens)


def crop_layers(layers: Iterable[Any], num_tokens: int) -> None:
    """Remove the last `num_tokens` tokens from some layers of a cache."""
    for layer in layers:
        crop(layer, num_tokens)


class _VisibleSlidingLayer(DynamicSlidingWindowLayer):
    """Returns K/V of as many tokens as the mask covers, even after several passes without a crop.

    The layer of transformers does the same from version 5.18 on.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `DynamicSlidingWindowLayer.update`, without the tokens outside the window."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


SLIDING_LAYER = (
    DynamicSlidingWindowLayer
    if version.parse(transformers.__version__) >= version.parse("5.18")
    else _VisibleSlidingLayer
)

MOVABLE = (DynamicLayer, DynamicSlidingWindowLayer, SLIDING_LAYER)  # layers that hold nothing but K/V


def start_recording(cache: Cache) -> None:
    """Allow rollback of a cache with sliding windows: keep tokens that leave a window until the next crop."""
    cache.activate_past_recording()
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.__class__ = SLIDING_LAYER


def stop_recording(cache: Cache) -> None:
    """Restore the usual sliding-window behaviour of a cache that is returned."""
    for layer in cache.layers:
        if type(layer) is SLIDING_LAYER:
            layer.__class__ = DynamicSlidingWindowLayer
        if getattr(layer, "record_past", False):
            crop(layer, 0)
            layer.record_past = False


def cut_back(cache: Cache, length: int) -> None:
    """Crop all layers to the first `length` tokens, after an interrupted pass wrote to some of them."""
    for layer in cache.layers:
        crop(layer, int(layer.get_seq_length()) - length)
    stop_recording(cache)


class CacheSlots:
    """The slots of a batch's cache, where each row accepts its own number of draft tokens.

    A pass writes one slot per row and token. Slots that all rows reject are cropped; others stay, in `rejected`, where
    the attention mask hides them and positions skip them. The cache is compacted when that frees a larger share of its
    slots than `compaction_threshold`, or when a mask cannot hide rejected slots (a sliding window counts slots): tokens
    move to each row's end, and the longest row then has no rejected slots.

    `length` is the number of committed slots; `attention_mask`, (rows, length), is the mask of the prompt, `None`
    without padding; `device` is the device of the tokens, since the layers of an offloaded cache move between devices.
    """

    def __init__(
        self,
        cache: Cache,
        length: int,
        attention_mask: Tensor | None,
        compaction_threshold: float,
        device: torch.device,
        ops: Ops = WITHOUT_KERNELS,
        has_windows: bool = False,
        keep: Callable[[int, list[int]], bool] | None = None,
    ) -> None:
        self.cache, self.length, self.mask = cache, length, attention_mask
        self.compaction_threshold, self.device = compaction_threshold, device
        self.ops, self.has_windows = ops, has_windows
        # Keeps tokens of the last pass of a single row, by index, behind a number of others, if it can; see `commit`.
        self.keep = keep
        self.rejected: Tensor | None = None
        self._num_tokens: list[int] = []  # of each row; valid while there are rejected slots
        self.num_compactions = 0

    def mask_for(self, width: int) -> Tensor | None:
        """(rows, cached + width) attention mask of a pass over `width` tokens; `None` if nothing is masked."""
        if self.mask is None:
            return None
        return torch.cat([self.mask, self.mask.new_ones((self.mask.shape[0], width))], dim=-1)

    def commit(self, width: int, kept: list[list[int]]) -> None:
        """Retain each row's `kept` slots, in ascending order, of the `width` that the last pass wrote."""
        if self.keep is not None and self.keep(self.length, kept[0]):
            self.length += len(kept[0])
            return
        accepted = [len(slots) for slots in kept]
        longest = max(accepted)
        if any(slots and slots[-1] >= len(slots) for slots in kept):  # a path through a tree
            self._move_forward(width, [slots + [0] * (longest - len(slots)) for slots in kept])
        if min(accepted) == longest and self.rejected is None:
            self.mask = self.mask_for(longest)
            self.length += longest
            # Crop even by 0 tokens, so that sliding-window layers drop the tokens that have left the window.
            self._crop(width - longest)
            return
        before = [self.length] * len(accepted) if self.rejected is None else self._num_tokens
        self._num_tokens = [tokens + count for tokens, count in zip(before, accepted, strict=True)]
        slots = torch.arange(width, device=self.device)
        mask, rejected = self._with_rejected(slots < torch.tensor(accepted, device=self.device)[:, None])
        if self.has_windows:
            self._compact(mask, rejected)
            return
        self._crop(width - longest)
        self.length += longest
        self.mask, self.rejected = mask[:, : self.length], rejected[:, : self.length]
        if 1 - max(self._num_tokens) / self.length > self.compaction_threshold:
            self._compact(self.mask, self.rejected)

    def compact(self) -> None:
        """Compact the cache, so that no rejected slots are left."""
        if self.mask is not None and self.rejected is not None:
            self._compact(self.mask, self.rejected)

    def recover(self) -> None:
        """Make the cache consistent after an interrupted pass, which may have written to some layers only.

        Each row retains as many tokens as the shortest row has, or no tokens if a sliding window has dropped slots.
        """
        cut_back(self.cache, self.length)
        if self.rejected is None:
            return
        has_all = all(layer.keys.shape[-2] == self.length for layer in self.cache.layers if layer.is_initialized)
        shortest = int((~self.rejected).sum(dim=1).min()) if has_all else 0
        order = torch.argsort(self.rejected.to(torch.uint8), dim=1, stable=True)[:, :shortest]  # rejected slots go last
        self._move(order, self.length)

    def select(self, rows: list[int]) -> Tensor:
        """Drop all rows except `rows`; return `rows` as an index tensor on the CPU, valid for layers on any device."""
        index = torch.tensor(rows)
        self.cache.batch_select_indices(index)
        if self.mask is not None:
            self.mask = self.mask[index.to(self.mask.device)]
        if self.rejected is not None:
            self.rejected = self.rejected[index.to(self.rejected.device)]
            self._num_tokens = [self._num_tokens[row] for row in rows]
        return index

    def _crop(self, num_tokens: int) -> None:
        if num_tokens or self.has_windows:
            crop_layers(self.cache.layers, num_tokens)

    def _move(self, order: Tensor, total: int) -> None:
        if self.cache.offloading and order.is_cuda:  # a layer may still be on its way to the GPU
            torch.cuda.current_stream(order.device).wait_stream(self.cache.prefetch_stream)
        for layer in self.cache.layers:
            if layer.is_initialized:  # without images, Mllama's cross-attention stores nothing
                _gather_slots(layer, order, total, self.ops)

    def _move_forward(self, width: int, order: list[list[int]]) -> None:
        """Move the K/V of the tokens in `order`, (rows, tokens), to the first of the slots that a pass wrote."""
        index = torch.tensor(order, device="cpu")[:, None, :, None]
        for layer in self.cache.layers:
            for part in self._written(layer, width) if layer.is_initialized else ():
                taken = index.to(part.device).expand(-1, part.shape[1], -1, part.shape[3])
                part[:, :, : len(order[0])] = part.gather(2, taken)

    def _written(self, layer: Any, width: int) -> tuple[Tensor, Tensor]:
        """The K/V that the last pass wrote."""
        return layer.keys[:, :, -width:], layer.values[:, :, -width:]

    def _with_rejected(self, is_accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Append a pass's tokens to mask and `rejected`, (rows, cached + width); `is_accepted` is (rows, width)."""
        shape, device = (is_accepted.shape[0], self.length), is_accepted.device
        mask = torch.ones(shape, dtype=torch.long, device=device) if self.mask is None else self.mask
        rejected = torch.zeros(shape, dtype=torch.bool, device=device) if self.rejected is None else self.rejected
        return torch.cat([mask, is_accepted.to(mask)], dim=-1), torch.cat([rejected, ~is_accepted], dim=-1)

    def _compact(self, mask: Tensor, rejected: Tensor) -> None:
        """Move each row's tokens to the last slots, by one gather (or kernel) per layer."""
        self.num_compactions += 1
        total, width = rejected.shape[1], max(self._num_tokens)
        # A stable sort puts rejected slots first and leaves the tokens in order; the longest row sets how many remain.
        order = torch.argsort((~rejected).to(torch.uint8), dim=1, stable=True)[:, -width:]
        self.mask, remaining = mask.gather(1, order), rejected.gather(1, order)
        self.rejected = remaining if min(self._num_tokens) < width else None
        self.length = width
        self._move(order.masked_fill(remaining, -1) if self.ops.kernels is not None else order, total)


def order_prefetch(cache: Any, device: torch.device) -> None:
    """Have an offloaded cache's next prefetch wait for what is queued on a GPU by now.

    transformers offloads a layer on one stream and prefetches it on another, at the end of a pass the first layer for
    the next pass, which may still be on its way to the host.
    """
    if device.type == "cuda" and getattr(cache, "offloading", False):
        cache.prefetch_stream.wait_stream(torch.cuda.current_stream(device))


def _gather_slots(layer: Any, order: Tensor, total: int, ops: Ops) -> None:
    """Keep only the slots `order`, (rows, remaining), of a layer; slots are counted from the start of the sequence.

    A negative index marks a slot that the mask hides, whose contents do not matter. A sliding-window layer retains
    only the last `sliding_window` - 1 of these slots.
    """
    width, stored = order.shape[1], layer.keys.shape[-2]
    if layer.is_sliding:
        order = order[:, -min(width, layer.sliding_window - 1) :] - (total - stored)
        layer.cumulative_length = width
    compact = ops.kv_compact if ops.run_on(layer.keys, layer.values) else kv_compact
    layer.keys, layer.values = compact(layer.keys, layer.values, order.to(layer.keys.device))
