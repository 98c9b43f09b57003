"""Passes of eager calls whose decoder layers run in one call of a C++ kernel (see `fused_layers`).

The model's own forward calls each layer. At the first one the kernel runs all layers up to the next one whose input the
run reads, and the others return the state that they are given. K/V are stored in buffers with slots for later passes,
of which the cache's layers hold the filled part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..base_model.structure import CACHE
from ..depth.gates import LayerGate, active_run, input_state
from .fused_layers import FusedLayer, FusedStack
from .layouts import sum_alike
from .linear_gate import layouts_now

SPARE_SLOTS = 64  # of a buffer, besides a quarter of those that are filled


class _Slots(NamedTuple):
    """K/V of one layer, (rows, heads, slots, head_size) each, of which `length` slots are filled."""

    keys: Tensor
    values: Tensor
    length: int
    are_kept: bool  # as a buffer of the call; else the cache stores the pass's K/V itself


class FusedPasses:
    """What runs the decoder layers of one eager call; an `ExecuteLayer`.

    Args:
        found: The layers that the kernel runs, by index, and up to how many tokens.
        num_layers: Of the model.
        may_join: Whether all layers may attend to the same tokens.
    """

    def __init__(self, found: dict[int, tuple[FusedLayer, int]], num_layers: int, may_join: bool) -> None:
        self._found, self._num_layers = found, num_layers
        self.most_tokens = min(limit for _, limit in found.values())  # of a pass whose layers the kernel runs
        # Whether the model hands each layer's output to the next one, and all of them the same arguments. `None` until
        # a pass has shown it.
        self._is_chain: bool | None = None if may_join else False
        self._given: tuple[Any, ...] = ()  # the last layer's output, angles and mask
        self._end = 0  # of the layers that have run in this pass
        self._stacks: dict[tuple[int, int], FusedStack] = {}  # by their first layer and the end of theirs
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # K/V, by layer

    def __call__(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer, and with it those that may run in the same call, in place of its own forward."""
        state, idx = input_state(args, kwargs), gate.layer_idx
        given = kwargs.get("position_embeddings"), kwargs.get("attention_mask")
        has_run = 0 < idx < self._end and state is self._given[0]
        if has_run:
            if given[0] is not self._given[1] or given[1] is not self._given[2]:
                raise AssertionError("layers of one pass got different arguments")  # a bug in tide_hf
            return gate.with_state(None, state)
        fused, limit = self._found.get(idx, (None, 0))
        suits = fused is not None and _may_run(state.shape[0] * state.shape[1], limit) and _is_plain(kwargs.get(CACHE))
        taken = fused.arguments_of(args, kwargs) if fused is not None and suits else None
        if taken is None:
            output = gate.native(*args, **kwargs)
            self._end = idx + 1
        else:
            self._end = self._end_from(idx, kwargs[CACHE], state.shape[0] * state.shape[1])
            output = gate.with_state(None, self._run(idx, kwargs[CACHE], *taken))
        self._compare(idx, state, given)
        self._given = gate.state_of(output), *given
        return output

    def _compare(self, idx: int, state: Tensor, given: tuple[Any, ...]) -> None:
        """Note whether a layer got what the layer before it got and gave, until all layers of a pass have."""
        if self._is_chain is None and idx > 0:
            before = self._given
            if not (len(before) == 3 and state is before[0] and given[0] is before[1] and given[1] is before[2]):
                self._is_chain = False
            elif idx == self._num_layers - 1:
                self._is_chain = True

    def _end_from(self, idx: int, cache: Any, tokens: int) -> int:
        """The end of the layers that may run in one call with layer `idx`."""
        run, end = active_run(), idx + 1
        most, length = run.joined_layers(idx) if self._is_chain and run is not None else end, _length(cache, idx)
        while end < most and length is not None:
            fused, limit = self._found.get(end, (None, 0))
            is_alike = fused is not None and _may_run(tokens, limit) and fused.is_like(self._found[idx][0])
            if not is_alike or _length(cache, end) != length:
                break
            end += 1
        return end

    def _run(self, idx: int, cache: Any, state: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        width, layers = state.shape[1], range(idx, self._end)
        if (idx, self._end) not in self._stacks:
            self._stacks[idx, self._end] = FusedStack([self._found[one][0] for one in layers])
        slots = [self._slots(cache, one, state, mask) for one in layers]
        most = max(one.keys.shape[2] for one in slots)  # buffers of fewer slots have held drafts that ran few layers
        slots = [
            one if one.keys.shape[2] == most else self._grown(i, one, most)
            for i, one in zip(layers, slots, strict=True)
        ]
        end = slots[0].length + width
        kv = [one.keys for one in slots], [one.values for one in slots]
        output = self._stacks[idx, self._end](*kv, state, cos, sin, mask, torch.tensor(end))
        for one, (keys, values, length, are_kept) in zip(layers, slots, strict=True):
            if are_kept:
                layer = cache.layers[one]
                layer.keys, layer.values = keys[:, :, :end], values[:, :, :end]
            else:
                cache.update(keys[:, :, length:end], values[:, :, length:end], one)
        return output

    def _slots(self, cache: Any, idx: int, state: Tensor, mask: Tensor | None) -> _Slots:
        """K/V of a layer with slots for a pass over hidden states `state` (rows, width, D), as the mask covers them."""
        layer: Any = cache.layers[idx] if idx < len(cache.layers) else None
        fused, (rows, width) = self._found[idx][0], state.shape[:2]
        if layer is None or not layer.is_initialized:
            new = state.new_empty(2, rows, fused.kv_heads, width, fused.head_size)
            return _Slots(new[0], new[1], 0, are_kept=False)
        length = layer.keys.shape[2]
        if type(layer) is not DynamicLayer:  # with a window, outside which it may hold tokens
            seen = length if mask is None else mask.shape[-1] - width
            keys, values = (_extended(part[:, :, length - seen :], width) for part in (layer.keys, layer.values))
            return _Slots(keys, values, seen, are_kept=False)
        kept = self._buffers.get(idx)
        if kept is None or kept[0].shape[2] < length + width or not all(map(_begins, kept, (layer.keys, layer.values))):
            spare = width + SPARE_SLOTS + length // 4
            kept = self._buffers[idx] = _extended(layer.keys, spare), _extended(layer.values, spare)
        return _Slots(*kept, length, are_kept=True)

    def _grown(self, idx: int, slots: _Slots, num_slots: int) -> _Slots:
        """Put a layer's K/V in a buffer of so many slots."""
        spare = num_slots - slots.keys.shape[2]
        kept = self._buffers[idx] = _extended(slots.keys, spare), _extended(slots.values, spare)
        return _Slots(*kept, slots.length, are_kept=True)


def _may_run(tokens: int, limit: int) -> bool:
    """Whether the kernel runs a pass: up to the limit, or all of those whose sums may not depend on their width."""
    return tokens <= limit or sum_alike(layouts_now())


def _length(cache: Any, idx: int) -> int | None:
    """The number of slots of a layer that holds all tokens; `None` for other layers, and those that are empty."""
    layer: Any = cache.layers[idx] if idx < len(cache.layers) else None
    return layer.keys.shape[2] if type(layer) is DynamicLayer and layer.is_initialized else None


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
