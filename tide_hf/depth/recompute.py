"""The run of `early_exit` with exact K/V: skipped layers run later, batched over several tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..base_model.inputs import TYPES
from ..base_model.structure import CACHE
from . import kv_cache
from .early_exit import PostHocRun
from .gates import LayerGate, input_state


class _CatchUp(BaseException):
    """Raised at a layer that lacks the K/V of earlier tokens."""


class RecomputeRun(PostHocRun):
    """A pass ends once all its rows have exited; the skipped layers run later, batched over several tokens.

    The first token that does not exit triggers a catch-up pass over all pending tokens through the layers that they
    skipped, which gives every layer exact K/V. Layers that did run are not run again: their last output is kept.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pending: list[_Token] = []
        self.current: _Token | None = None
        self.resume_at = 0  # in a catch-up pass, the layers that all its tokens have executed

    def call(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run in place of the model's forward; catch up first if the pass needs it."""
        self.current = _Token(kwargs)
        cache, ids = kwargs[CACHE], kwargs["input_ids"]
        if ids is None or ids.shape[1] > 1:
            return forward(**kwargs)  # prefill runs at full depth
        kv_cache.start_recording(cache)
        try:
            output = forward(**kwargs)
        except _CatchUp:
            output = self.catch_up(forward, [*self.pending, self.current])
        if not self.pending:
            for layer in cache.layers:
                kv_cache.crop(layer, 0)
        return output

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute or skip one layer, or abort the pass for a catch-up."""
        state, executed = input_state(args, kwargs), gate.layer_idx + 1
        if self.resume_at:
            return self._run_layer_again(gate, args, kwargs)
        if gate.layer_idx == 0:
            self.begin_pass(state)
        if self.all_exited:
            if executed == self.num_layers:
                state = self.after_layer(executed, state)
                self.pending.append(self.current)  # type: ignore[arg-type]
            return gate.with_state(None, state)
        if self.pending and gate.layer_idx == min(token.depth for token in self.pending):
            raise _CatchUp
        output = self.execute(gate, args, kwargs)
        state = gate.state_of(output)
        if self.may_exit and executed in self.exit_layers:
            self.current.keep(executed, state)  # type: ignore[union-attr]
        return gate.with_state(output, self.after_layer(executed, state))

    def catch_up(self, forward: Callable[..., Any], tokens: list[_Token]) -> Any:
        """Run `tokens`, which may end with the current one, through the layers that the first of them skipped."""
        cache: Cache = tokens[-1].kwargs[CACHE]
        self.resume_at = min(token.depth for token in self.pending)
        self.states = torch.cat([token.states[self.resume_at] for token in tokens], dim=1)
        complete = cache.get_seq_length(self.num_layers - 1)
        shallow = [dict(layer.__dict__) for layer in cache.layers[: self.resume_at]]
        for layer in cache.layers:
            kv_cache.crop(layer, layer.get_seq_length() - complete)
        try:
            output = forward(**_concatenated(tokens))
        finally:
            self.resume_at = 0
        for layer, contents in zip(cache.layers, shallow, strict=False):
            layer.__dict__.update(contents)
        self.pending.clear()
        return output

    def flush(self, forward: Callable[..., Any]) -> None:
        """Complete the K/V of pending tokens in a cache that is returned."""
        if self.pending:
            self.may_exit = False
            num_passes = len(self.per_pass)
            self.catch_up(forward, list(self.pending))
            del self.per_pass[num_passes:]
        kv_cache.stop_recording(self.current.kwargs[CACHE])  # type: ignore[union-attr]

    def give_up(self, cache: Cache) -> None:
        """Crop a returned cache to the tokens that all layers have, after an interrupted call."""
        kv_cache.cut_back(cache, min(int(layer.get_seq_length()) for layer in cache.layers))

    def _run_layer_again(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer of a catch-up pass."""
        executed = gate.layer_idx + 1
        if executed <= self.resume_at:
            return gate.with_state(None, self.states if executed == self.resume_at else input_state(args, kwargs))
        output = self.execute(gate, args, kwargs)
        return gate.with_state(output, self.after_layer(executed, gate.state_of(output)))


class _Token:
    """One decoded token per row: the model's arguments, and its hidden states at the exit layers it reached."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs
        self.states: dict[int, Tensor] = {}

    @property
    def depth(self) -> int:
        """Layers executed for it."""
        return max(self.states)

    def keep(self, executed: int, state: Tensor) -> None:
        """Keep the (rows, 1, D) hidden states after `executed` layers."""
        self.states[executed] = state


def _concatenated(tokens: list[_Token]) -> dict[str, Any]:
    """Keyword arguments of one call over several tokens that were decoded one by one."""
    merged = dict(tokens[-1].kwargs)
    for name in ("input_ids", "position_ids", *TYPES):
        if merged.get(name) is not None:
            merged[name] = torch.cat([token.kwargs[name] for token in tokens], dim=-1)
    return merged
