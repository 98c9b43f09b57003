"""The runs of `early_exit` and `post_hoc`: tokens leave where a criterion says so.

`PostHocRun` and `recompute.RecomputeRun` give the same tokens: both read an exited token's logits from its early state
and keep the K/V of every layer exact. One runs the deeper layers at once, the other when a later token needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base_model.structure import DecoderStructure
from ..base_model.unembed import Unembed
from ..routers.exit_points import ExitPoint
from ..routers.routers import TIDERouters
from . import kv_cache
from .gates import LayerGate, LayerRun, input_state, on_device


class ExitRun(LayerRun):
    """Tokens leave where a score reaches the threshold. Common to all strategies.

    Only passes of one token per row may exit, and the prompt's where the run says so.

    Args:
        structure: The base model's structure.
        cache: The cache of the call.
        routers: Its routers.
        unembed: Its unembedding.
        exit_threshold: Exit where `score >= exit_threshold`.
        exit_criterion: What is scored: `"router"` (the router's score), `"confidence"` (the exit head's largest
            probability, as in CALM, arXiv 2207.07061) or `"fixed"` (every token leaves at the first exit layer).
        min_layers: No token leaves after fewer layers.

    Attributes:
        exit_layers_of_pass: (rows, length) exit layer of each token in the current pass; `num_layers` where none.
        per_pass: One list of exit layers per forward pass so far, of each row's last token.
        mlp_tokens_skipped: Tokens, counted once per layer, that an MLP did not have to see.
    """

    exits_in_prompt = False

    def __init__(
        self,
        structure: DecoderStructure,
        cache: Any,
        routers: TIDERouters,
        unembed: Unembed,
        exit_threshold: float,
        exit_criterion: str = "router",
        min_layers: int = 0,
    ) -> None:
        super().__init__(structure, cache)
        self.routers = routers
        self.unembed = unembed
        self.ops = unembed.ops
        self.exit_threshold = exit_threshold
        self.exit_criterion = exit_criterion
        self.exit_layers = frozenset(layer for layer in routers.exit_layers if layer >= min_layers)
        self.exit_layers_of_pass = torch.empty(0, 0, dtype=torch.long)
        self.may_exit = False
        self.num_exited = 0
        self.per_pass: list[list[int]] = []
        self.mlp_tokens_skipped = 0

    def begin_pass(self, hidden_states: Tensor) -> None:
        """Start afresh with the first layer of a forward pass."""
        rows, length = hidden_states.shape[:2]
        self.may_exit = length == 1 or self.exits_in_prompt
        self.num_exited = 0
        shape = (rows, length if self.may_exit else 1)
        self.exit_layers_of_pass = torch.full(shape, self.num_layers, device=hidden_states.device)

    def decide(self, exit_layer: int, hidden_states: Tensor) -> Tensor | None:
        """Score the tokens that are still in the pass; return the mask of those that leave here, if any does."""
        exits = self.exit_layers_of_pass.to(hidden_states.device)
        scores = self.score(on_device(self.routers[exit_layer], hidden_states), hidden_states)
        leaves = (scores >= self.exit_threshold) & (exits == self.num_layers)
        count = int(leaves.sum())
        if count == 0:
            return None
        self.exit_layers_of_pass = torch.where(leaves, exit_layer, exits)
        self.num_exited += count
        return leaves

    @property
    def all_exited(self) -> bool:
        """Whether every token of the pass has left."""
        return self.num_exited == self.exit_layers_of_pass.numel()

    def score(self, exit_point: ExitPoint, hidden_states: Tensor) -> Tensor:
        """(..., D) hidden states -> (...) exit scores in float32."""
        if self.exit_criterion == "fixed":
            return torch.full(hidden_states.shape[:-1], float("inf"), device=hidden_states.device)
        if self.exit_criterion == "confidence":
            return self.unembed(exit_point.head(hidden_states)).float().softmax(dim=-1).amax(dim=-1)
        return self.unembed.route(exit_point.router, hidden_states)

    def end_pass(self) -> None:
        """Note the layer that each row was read from."""
        self.per_pass.append(self.exit_layers_of_pass[:, -1].tolist())

    def exited(self, state: Tensor) -> Tensor:
        """(rows, length, 1) mask of the tokens that have left, on the device of `state`."""
        return (self.exit_layers_of_pass < self.num_layers).to(state.device)[..., None]


class PropagateRun(ExitRun):
    """A token that leaves stops there; deeper layers only store K/V for it, unless another token still needs them.

    Args:
        *args: As [`ExitRun`].
        fill: Writes the K/V of a skipped layer: `kv_cache.fill_skipped` (`propagate`) or `fill_zeros` (`zero_pad`).
        exits_in_prompt: Whether prompt tokens may leave as well. Their state stays as it is; deeper layers still
            compute their K/V from it, but not their MLP.
        **kwargs: As [`ExitRun`].
    """

    def __init__(
        self,
        *args: Any,
        fill: Callable[..., None] = kv_cache.fill_skipped,
        exits_in_prompt: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.fill = fill
        self.exits_in_prompt = exits_in_prompt

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute, freeze or skip one layer."""
        before = input_state(args, kwargs)
        if gate.layer_idx == 0:
            self.begin_pass(before)
        if self.all_exited:
            self.fill(gate, args, kwargs)
            output, state = None, before
        else:
            output = self.execute(gate, args, kwargs)
            state = gate.state_of(output)
            if self.num_exited:
                state = torch.where(self.exited(state), before.to(state.device), state)
        executed = gate.layer_idx + 1
        if self.may_exit and not self.all_exited and executed in self.exit_layers:
            self.decide(executed, state)
        if executed == self.num_layers:
            state = self._translate(state)
            self.end_pass()
        return gate.with_state(output, state)

    def tokens_for_mlp(self) -> Tensor | None:
        """Leave out those that have left, in a pass over several tokens."""
        if not self.num_exited or self.all_exited or self.exit_layers_of_pass.shape[1] == 1:
            return None  # for a few rows of one token, gathering costs more than it saves
        self.mlp_tokens_skipped += self.num_exited
        return self.exit_layers_of_pass == self.num_layers

    def _translate(self, state: Tensor) -> Tensor:
        """Pass the last token of each row that has left through the head of its exit layer."""
        if not self.num_exited:
            return state
        exits, last = self.exit_layers_of_pass[:, -1], state[:, -1:]
        for exit_layer in sorted(set(exits.tolist()) & self.exit_layers):
            rows = (exits == exit_layer).to(state.device)
            head = on_device(self.routers[exit_layer], state).head
            last = torch.where(rows[:, None, None], head(last), last)
        return last if state.shape[1] == 1 else torch.cat([state[:, :-1], last], dim=1)


class PostHocRun(ExitRun):
    """All layers run; the state of the earliest exit that agrees replaces the last one (TIDE, Algorithm 1)."""

    def begin_pass(self, hidden_states: Tensor) -> None:
        """Forget the exited states of the pass before."""
        super().begin_pass(hidden_states)
        self.exited_state: Tensor | None = None

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute one layer and remember exited states for the last one."""
        if gate.layer_idx == 0:
            self.begin_pass(input_state(args, kwargs))
        output = self.execute(gate, args, kwargs)
        return gate.with_state(output, self.after_layer(gate.layer_idx + 1, gate.state_of(output)))

    def after_layer(self, executed: int, state: Tensor) -> Tensor:
        """Let tokens leave after `executed` layers; behind the last one put in the states of those that left."""
        if self.may_exit and not self.all_exited and executed in self.exit_layers:
            leaves = self.decide(executed, state[:, -1:])
            if leaves is not None:
                early = on_device(self.routers[executed], state).head(state[:, -1:])
                kept = early if self.exited_state is None else self.exited_state.to(state.device)
                self.exited_state = torch.where(leaves[..., None], early, kept)
        if executed == self.num_layers:
            if self.exited_state is not None:
                last = torch.where(self.exited(state), self.exited_state.to(state.device), state[:, -1:])
                state = torch.cat([state[:, :-1], last], dim=1)
            self.end_pass()
        return state
