"""Passes of eager calls whose decoder layers run in one call of a C++ kernel (see `fused_layers`).

The model's own forward calls each layer. At the first one the kernel runs all layers that may run with it, and gives
the run the states between them that it reads; the others return the state that they are given. K/V are stored in
buffers with slots for later passes, of which the cache's layers hold the filled part.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..base_model.structure import CACHE
from ..common.errors import UnsupportedModelError
from ..depth.gates import LayerGate, active_run, input_state
from .fused_layers import FusedLayer, FusedLayers, FusedStack
from .layouts import DECODE_ROWS, sum_alike
from .linear_gate import layouts_now

SPARE_SLOTS = 64


class _Buffers:
    """K/V of all layers of one cache, with slots for later passes; `parts`: (2, layers, rows, heads, slots, size)."""

    def __init__(self, cache: Any, parts: Tensor) -> None:
        self.cache, self.parts, self.rows, self.num_slots = cache, parts, parts.shape[2], parts.shape[4]
        self.keys, self.values = (list(part.unbind()) for part in parts)
        self._shown: dict[int, tuple[Tensor, Tensor]] = {}  # the K/V that each layer of the cache has got

    def take(self, layers: range) -> None:
        """Copy the K/V of those layers of the cache that are not in these buffers yet."""
        for idx in layers:
            layer, mine = self.cache.layers[idx], (self.keys[idx], self.values[idx])
            if not layer.is_initialized:
                layer.lazy_initialization(*mine)
                continue
            found, shown = (layer.keys, layer.values), self._shown.get(idx, (None, None))
            if found[0] is not shown[0] or found[1] is not shown[1]:
                for buffer, part in zip(mine, found, strict=True):
                    if not _begins(buffer, part):
                        buffer[:, :, : part.shape[2]] = part

    def move(self, start: int, slots: list[int]) -> None:
        """Move the K/V of all layers in these slots, counted from `start` on and ascending, to the first of them."""
        index = torch.tensor(slots) + start
        self.parts[..., start : start + len(slots), :] = self.parts.index_select(-2, index)

    def keep_rows(self, order: list[int]) -> None:
        """Keep these rows of all layers, in this order; only those are copied that change their place."""
        moved = [row for row, before in enumerate(order) if row != before]
        self.parts[:, :, moved] = self.parts[:, :, [order[row] for row in moved]]
        self.parts, self.rows = self.parts[:, :, : len(order)], len(order)
        self.keys, self.values = (list(part.unbind()) for part in self.parts)

    def show(self, layers: range, length: int) -> None:
        """Give layers of the cache the first `length` slots."""
        filled = (part[layers.start : layers.stop, :, :, :length].unbind() for part in self.parts)
        for idx, keys, values in zip(layers, *filled, strict=True):
            layer = self.cache.layers[idx]
            layer.keys, layer.values = self._shown[idx] = keys, values


class FusedPasses:
    """What runs the decoder layers of one eager call; an `ExecuteLayer`.

    Args:
        layers: The model's layers.
        found: Those that the kernel runs, by index, and up to how many tokens.
        spare_slots: Of buffers, besides a quarter of those that are filled.
    """

    def __init__(
        self, layers: FusedLayers, found: dict[int, tuple[FusedLayer, int]], spare_slots: int = SPARE_SLOTS
    ) -> None:
        self._found, self._layers, self._num_layers = found, layers, layers.structure.num_layers
        self._spare_slots = spare_slots
        self.most_tokens = min(limit for _, limit in found.values())  # of a pass whose layers the kernel runs
        self._may_join = layers.may_join
        self._is_chain = True  # so far in this pass
        self._by_kernel = False  # whether the kernel has run all layers so far in this pass
        self._called = -1  # the layer that was called last
        self._first: Tensor | None = None  # the first layer's input in this pass
        self._given: tuple[Any, ...] = (None, None, None)  # the last layer's output, angles and mask
        self.end = 0  # of the layers that have run in this pass
        self._stacks: dict[tuple[int, int], FusedStack] = {}  # by their first layer and the end of theirs
        self._buffers: dict[tuple[int, int], _Buffers] = {}  # by heads and their size
        self._awaits_keep = False  # whether each pass over all layers is followed by `keep`
        self._unshown: _Buffers | None = None  # what the cache gets by `keep`

    @property
    def runs_each(self) -> bool:
        """Whether the kernel runs each layer of the model."""
        return len(self._found) == self._num_layers

    @property
    def run_all(self) -> bool:
        """Whether the kernel runs all layers in passes over drafts on this cache, as it did in the last pass."""
        return self._joins and self._by_kernel and self.most_tokens >= DECODE_ROWS[-1]

    @property
    def last_pass(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]] | None:
        """Of the last pass: the first layer's input, the last one's output, and the angles; `None` before a pass."""
        return None if self._first is None else (self._first, *self._given[:2])

    def await_keep(self) -> Callable[[int, list[int]], bool]:
        """Leave what each pass over all layers gives the cache to `keep`, which is returned."""
        self._awaits_keep = True
        return self.keep

    def keep(self, start: int, slots: list[int]) -> bool:
        """Give the cache, of a single row, the K/V of these tokens of the last pass, by index, behind `start` others.

        Returns whether it could; otherwise the cache has the K/V of all tokens of the pass. Views of sixty tensors take
        a tenth of a millisecond, so they are made once a round.
        """
        buffers, self._unshown = self._unshown, None
        if buffers is None:
            return False
        if slots and slots[-1] >= len(slots):  # a path through a tree
            buffers.move(start, slots)
        buffers.show(range(self._num_layers), start + len(slots))
        return True

    def keep_rows(self, cache: Any, order: list[int]) -> None:
        """Keep these rows of the cache, in this order; those that stay in their place are not copied."""
        buffers = [one for one in self._buffers.values() if one.cache is cache]
        if not self._by_kernel or len(buffers) != 1:
            cache.batch_select_indices(torch.tensor(order))
            return
        buffers[0].keep_rows(order)
        buffers[0].show(range(self._num_layers), cache.get_seq_length())

    def __call__(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer, and with it those that may run in the same call, in place of its own forward."""
        state, idx = input_state(args, kwargs), gate.layer_idx
        given = state, kwargs.get("position_embeddings"), kwargs.get("attention_mask")
        is_next, follows = idx == self._called + 1, all(map(is_, given, self._given))
        self._called = idx
        if 0 < idx < self.end and (follows or is_next):
            if not follows:
                raise _changed(idx)
            return gate.with_state(None, state)
        if idx == 0:
            self._first, self._by_kernel = state, self.runs_each
        self._is_chain = idx == 0 or (self._is_chain and is_next and follows)
        fused, limit = self._found.get(idx, (None, 0))
        suits = fused is not None and _may_run(state.shape[0] * state.shape[1], limit) and _is_plain(kwargs.get(CACHE))
        taken = fused.arguments_of(args, kwargs) if fused is not None and suits else None
        if taken is None:
            output = gate.native(*args, **kwargs)
            self.end, self._by_kernel = idx + 1, False
        else:
            self.end = self._end_from(idx, kwargs[CACHE], state.shape[0] * state.shape[1])
            output = gate.with_state(None, self._run(idx, kwargs[CACHE], *taken))
        self._given = gate.state_of(output), *given[1:]
        if self._is_chain and idx == self._num_layers - 1:
            self._layers.note_chain()
        return output

    @property
    def _joins(self) -> bool:
        return self._may_join and self._layers.are_chain

    def _end_from(self, idx: int, cache: Any, tokens: int) -> int:
        """The end of the layers that may run in one call with layer `idx`."""
        run, end = active_run(), idx + 1
        most, length = run.joined_layers(idx) if self._joins and run is not None else end, _length(cache, idx)
        while end < most and length is not None:
            fused, limit = self._found.get(end, (None, 0))
            is_alike = fused is not None and _may_run(tokens, limit) and fused.is_like(self._found[idx][0])
            if not is_alike or _length(cache, end) != length:
                break
            end += 1
        return end

    def _run(self, idx: int, cache: Any, state: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        layers = range(idx, self.end)
        if (idx, self.end) not in self._stacks:
            self._stacks[idx, self.end] = FusedStack([self._found[one][0] for one in layers])
        stack = self._stacks[idx, self.end]
        if idx >= len(cache.layers) or type(cache.layers[idx]) is not DynamicLayer:
            return self._run_apart(stack, cache, idx, state, cos, sin, mask)
        length = int(cache.layers[idx].get_seq_length())
        end = length + state.shape[1]
        buffers = self._buffers_for(cache, idx, length, state)
        buffers.take(layers)
        keys, values = (part[idx : self.end] for part in (buffers.keys, buffers.values))
        run = active_run()
        taps = [] if run is None or len(layers) == 1 else run.taps_in(idx, self.end)
        tapped = state.new_empty(*state.shape[:2], len(taps), state.shape[2]) if taps else None
        numbers = [depth - idx for depth in taps]
        output = stack(keys, values, state, cos, sin, mask, torch.tensor(end), tapped=tapped, taps=numbers)
        if run is not None and tapped is not None:
            run.take_tapped(taps, tapped)
        if self._awaits_keep and len(layers) == self._num_layers:
            self._unshown = buffers
        else:
            buffers.show(layers, end)
        return output

    def _buffers_for(self, cache: Any, idx: int, length: int, state: Tensor) -> _Buffers:
        """Buffers with slots for a pass over hidden states `state` (rows, width, D) behind `length` tokens."""
        heads, size, (rows, width) = self._found[idx][0].kv_heads, self._found[idx][0].head_size, state.shape[:2]
        kept = self._buffers.get((heads, size))
        if kept is None or kept.cache is not cache or kept.rows != rows or kept.num_slots < length + width:
            slots = length + width + self._spare_slots + length // 4
            kept = _Buffers(cache, state.new_empty(2, self._num_layers, rows, heads, slots, size))
            self._buffers[heads, size] = kept
        return kept

    def _run_apart(
        self, stack: FusedStack, cache: Any, idx: int, state: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Run a layer that may hold tokens outside a window, or is not there yet; the cache stores its K/V itself."""
        layer: Any = cache.layers[idx] if idx < len(cache.layers) else None
        fused, (rows, width) = self._found[idx][0], state.shape[:2]
        if layer is None or not layer.is_initialized:
            length = 0
            keys, values = state.new_empty(2, rows, fused.kv_heads, width, fused.head_size)
        else:
            stored = layer.keys.shape[2]
            length = stored if mask is None else mask.shape[-1] - width
            keys, values = (_extended(part[:, :, stored - length :], width) for part in (layer.keys, layer.values))
        output = stack([keys], [values], state, cos, sin, mask, torch.tensor(length + width))
        cache.update(keys[:, :, length:], values[:, :, length:], idx)
        return output


def _changed(idx: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        "the model does not call its layers as in earlier calls",
        got=f"layer {idx} with other arguments than the output, angles and mask of layer {idx - 1}",
        expected="what the model did when TIDE was attached",
        do="Detach TIDE and attach it again after changing how the model runs.",
    )


def _may_run(tokens: int, limit: int) -> bool:
    """Whether the kernel runs a pass: up to the limit, or all of those whose sums may not depend on their width."""
    return tokens <= limit or sum_alike(layouts_now())


def _length(cache: Any, idx: int) -> int | None:
    """The number of slots of a layer that holds all tokens; `None` for other layers."""
    layer: Any = cache.layers[idx] if idx < len(cache.layers) else None
    return int(layer.get_seq_length()) if type(layer) is DynamicLayer else None


def _is_plain(cache: Any) -> bool:
    """Whether K/V are in memory, and grow with each pass."""
    return type(cache) is DynamicCache and not cache.offloading


def _extended(part: Tensor, num_slots: int) -> Tensor:
    """A copy with more slots."""
    rows, heads, length, size = part.shape
    found = part.new_empty(rows, heads, length + num_slots, size)
    found[:, :, :length] = part
    return found


def _begins(buffer: Tensor, part: Tensor) -> bool:
    """Whether a part of K/V is the first slots of a buffer."""
    is_there = part.data_ptr() == buffer.data_ptr() and part.stride() == buffer.stride()
    return is_there and part.shape[:2] == buffer.shape[:2]
