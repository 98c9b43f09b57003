"""The runs of `early_exit` and `post_hoc`, in which tokens exit where a criterion holds.

`PostHocRun` and `RecomputeRun` give the same tokens: both read an exited token's logits from the hidden state at its
exit layer and keep the K/V of every layer exact. `PostHocRun` runs the deeper layers in the same pass, `RecomputeRun`
when a later token needs their K/V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..base_model.inputs import TYPES
from ..base_model.structure import CACHE, DecoderStructure
from ..base_model.unembed import Unembed
from ..kernels.reference import exit_mask
from ..routers.exit_points import ExitPoint
from ..routers.routers import TIDERouters
from .gates import LayerGate, LayerRun, input_state, on_device
from .kv_cache import crop, crop_layers, cut_back, start_recording, stop_recording


@dataclass(frozen=True)
class ExitOptions:
    """How the tokens of one call exit; see [`PostHocRun`]."""

    routers: TIDERouters
    exit_threshold: float
    exit_criterion: str = "router"
    min_layers: int = 0

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """Where tokens may exit, in ascending order."""
        return tuple(sorted(layer for layer in self.routers.exit_layers if layer >= self.min_layers))

    @property
    def may_exit(self) -> bool:
        """Whether any score reaches the threshold."""
        return self.exit_criterion == "fixed" or self.exit_threshold <= 1


class PostHocRun(LayerRun):
    """Runs all layers; a token's state at its earliest exit replaces its last hidden state (TIDE, Algorithm 1).

    A token exits at the first exit layer, after at least `min_layers` layers, where `score >= exit_threshold`, in
    decode passes, of one token per row. `exit_criterion` names the score: `"router"` (the router's score),
    `"confidence"` (the exit head's largest probability, as in CALM, arXiv 2207.07061) or `"fixed"` (every token exits
    at the first exit layer).
    """

    def __init__(self, structure: DecoderStructure, cache: Any, unembed: Unembed, options: ExitOptions) -> None:
        super().__init__(structure, cache)
        self.options, self.routers, self.unembed = options, options.routers, unembed
        self.exit_layers = frozenset(options.exit_layers)
        # (rows, 1) exit layer of each token in the current pass; `num_layers` for tokens that have not exited.
        self.exit_layers_of_pass = torch.empty(0, 0, dtype=torch.long)
        self.may_exit, self.num_exited = False, 0  # in the current pass
        self.exited_state: Tensor | None = None  # (rows, 1, D) after the exit heads
        self.per_pass: list[list[int]] = []  # for each pass, the exit layer of each row's last token

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute one layer; hold the hidden states of exited tokens until the last layer."""
        if gate.layer_idx == 0:
            self.begin_pass(input_state(args, kwargs))
        output = self.execute(gate, args, kwargs)
        return gate.with_state(output, self.after_layer(gate.layer_idx + 1, gate.state_of(output)))

    def begin_pass(self, hidden_states: Tensor) -> None:
        """Reset the state at the first layer of a forward pass."""
        rows, length = hidden_states.shape[:2]
        self.may_exit, self.num_exited, self.exited_state = length == 1, 0, None
        self.exit_layers_of_pass = torch.full((rows, 1), self.num_layers, device=hidden_states.device)

    def decide(self, exit_layer: int, hidden_states: Tensor) -> Tensor | None:
        """Score the tokens at `exit_layer`; return the mask of tokens that exit there, or `None` if no token does."""
        exits = self.exit_layers_of_pass.to(hidden_states.device)
        point = on_device(self.routers[exit_layer], hidden_states)
        scores = exit_scores(self.options.exit_criterion, self.unembed, point, hidden_states)
        exiting = exit_mask(scores, self.options.exit_threshold, exits == self.num_layers)
        count = int(exiting.sum())
        if count == 0:
            return None
        self.exit_layers_of_pass = torch.where(exiting, exit_layer, exits)
        self.num_exited += count
        return exiting

    @property
    def all_exited(self) -> bool:
        """Whether every token of the pass has exited."""
        return self.num_exited == self.exit_layers_of_pass.numel()

    def after_layer(self, executed: int, state: Tensor) -> Tensor:
        """Decide on exits after `executed` layers; after the last layer, insert the hidden states of exited tokens."""
        if self.may_exit and not self.all_exited and executed in self.exit_layers:
            exit_mask = self.decide(executed, state[:, -1:])
            if exit_mask is not None:
                exited = on_device(self.routers[executed], state).head(state[:, -1:])
                before = exited if self.exited_state is None else self.exited_state.to(state.device)
                self.exited_state = torch.where(exit_mask[..., None], exited, before)
        if executed == self.num_layers:
            if self.exited_state is not None:
                exited = (self.exit_layers_of_pass < self.num_layers).to(state.device)[..., None]
                last = torch.where(exited, self.exited_state.to(state.device), state[:, -1:])
                state = torch.cat([state[:, :-1], last], dim=1)
            self.per_pass.append(self.exit_layers_of_pass[:, 0].tolist())
        return state


def exit_scores(criterion: str, unembed: Unembed, exit_point: ExitPoint, hidden_states: Tensor) -> Tensor:
    """(..., D) hidden states at an exit layer -> (...) exit scores in float32, by a criterion (see [`PostHocRun`])."""
    if criterion == "fixed":
        return torch.full(hidden_states.shape[:-1], float("inf"), device=hidden_states.device)
    if criterion == "confidence":
        return unembed(exit_point.head(hidden_states)).float().softmax(dim=-1).amax(dim=-1)
    return unembed.route(exit_point.router, hidden_states)


class _CatchUp(BaseException):
    """Raised at a layer that lacks the K/V of earlier tokens."""


@dataclass
class _Token:
    """One decoded token per row: the model's arguments, and the token's hidden states at the exit layers reached."""

    kwargs: dict[str, Any]
    states: dict[int, Tensor] = field(default_factory=dict)  # (rows, 1, D), by number of layers executed

    @property
    def depth(self) -> int:
        """Number of layers executed for the token."""
        return max(self.states)


class RecomputeRun(PostHocRun):
    """Ends a pass once all its rows have exited; the skipped layers run later, for several tokens in one pass.

    The first token that runs a layer which a pending token skipped triggers a catch-up pass over all pending tokens.
    This pass starts from stored hidden states, after the layers that all these tokens ran, and makes all K/V exact.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pending: list[_Token] = []
        self.current: Any = None  # the `_Token` of the running pass
        self.resume_at = 0  # in a catch-up pass, the number of layers that all its tokens have executed

    def call(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run one pass of the model; catch up if a layer lacks the K/V of earlier tokens."""
        self.current = _Token(kwargs)
        cache, ids = kwargs[CACHE], kwargs["input_ids"]
        if ids is None or ids.shape[1] > 1:
            return forward(**kwargs)  # prefill runs at full depth
        start_recording(cache)
        try:
            output = forward(**kwargs)
        except _CatchUp:
            output = self.catch_up(forward, [*self.pending, self.current])
        if not self.pending:
            crop_layers(cache.layers, 0)
        return output

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute or skip one layer, or abort the pass for a catch-up."""
        if self.resume_at:
            return self._run_layer_again(gate, args, kwargs)
        state, executed = input_state(args, kwargs), gate.layer_idx + 1
        if gate.layer_idx == 0:
            self.begin_pass(state)
        if self.all_exited:
            if executed == self.num_layers:
                state = self.after_layer(executed, state)
                self.pending.append(self.current)
            return gate.with_state(None, state)
        if self.pending and gate.layer_idx == min(token.depth for token in self.pending):
            raise _CatchUp
        output = self.execute(gate, args, kwargs)
        state = gate.state_of(output)
        if self.may_exit and executed in self.exit_layers:
            self.current.states[executed] = state
        return gate.with_state(output, self.after_layer(executed, state))

    def _run_layer_again(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer of a catch-up pass, in which tokens that exited run the layers that they skipped."""
        executed = gate.layer_idx + 1
        if executed <= self.resume_at:
            return gate.with_state(None, self.states if executed == self.resume_at else input_state(args, kwargs))
        output = self.execute(gate, args, kwargs)
        return gate.with_state(output, self.after_layer(executed, gate.state_of(output)))

    def catch_up(self, forward: Callable[..., Any], tokens: list[_Token]) -> Any:
        """Run `tokens`, all pending tokens and maybe the current token, through the layers that any of them skipped."""
        cache: Cache = tokens[-1].kwargs[CACHE]
        self.resume_at = min(token.depth for token in self.pending)
        self.states = torch.cat([token.states[self.resume_at] for token in tokens], dim=1)
        complete = cache.get_seq_length(self.num_layers - 1)
        executed_layers = [dict(layer.__dict__) for layer in cache.layers[: self.resume_at]]
        for layer in cache.layers:
            crop(layer, layer.get_seq_length() - complete)
        try:
            output = forward(**_concatenated(tokens))
        finally:
            self.resume_at = 0
        for layer, contents in zip(cache.layers, executed_layers, strict=False):
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
        stop_recording(self.current.kwargs[CACHE])

    def recover(self, cache: Cache) -> None:
        """After an interrupted call, crop a returned cache to the tokens whose K/V every layer holds."""
        cut_back(cache, min(int(layer.get_seq_length()) for layer in cache.layers))


def _concatenated(tokens: list[_Token]) -> dict[str, Any]:
    """Keyword arguments of one call over several tokens that were decoded one by one."""
    merged = dict(tokens[-1].kwargs)
    for name in ("input_ids", "position_ids", *TYPES):
        if merged.get(name) is not None:
            merged[name] = torch.cat([token.kwargs[name] for token in tokens], dim=-1)
    return merged
