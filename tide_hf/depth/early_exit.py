"""The runs of `early_exit` and `post_hoc`, in which tokens exit where a criterion holds.

`PostHocRun` and `recompute.RecomputeRun` give the same tokens: both read an exited token's logits from the hidden state
at its exit layer and keep the K/V of every layer exact. The first runs the deeper layers at once, the second when a
later token needs them.
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
    """A token exits where its score reaches the threshold. Common to all strategies.

    Decode passes, of one token per row, may exit; prefill only where the run allows it.

    Args:
        structure: The base model's structure.
        cache: The cache of the call.
        routers: Its routers.
        unembed: Its unembedding.
        exit_threshold: Exit where `score >= exit_threshold`.
        exit_criterion: What is scored: `"router"` (the router's score), `"confidence"` (the exit head's largest
            probability, as in CALM, arXiv 2207.07061) or `"fixed"` (every token exits at the first exit layer).
        min_layers: No token exits after fewer layers.

    Attributes:
        exit_layers_of_pass: (rows, length) exit layer of each token in the current pass; `num_layers` without an exit.
        per_pass: The exit layers of each row's last token, one list per forward pass.
        mlp_tokens_skipped: Tokens that MLPs skipped, counted once per layer.
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
        """Reset the state at the first layer of a forward pass."""
        rows, length = hidden_states.shape[:2]
        self.may_exit = length == 1 or self.exits_in_prompt
        self.num_exited = 0
        shape = (rows, length if self.may_exit else 1)
        self.exit_layers_of_pass = torch.full(shape, self.num_layers, device=hidden_states.device)

    def decide(self, exit_layer: int, hidden_states: Tensor) -> Tensor | None:
        """Score the tokens that have not exited; return the exit mask of this layer, or `None` if none exits."""
        exits = self.exit_layers_of_pass.to(hidden_states.device)
        scores = self.score(on_device(self.routers[exit_layer], hidden_states), hidden_states)
        exit_mask = (scores >= self.exit_threshold) & (exits == self.num_layers)
        count = int(exit_mask.sum())
        if count == 0:
            return None
        self.exit_layers_of_pass = torch.where(exit_mask, exit_layer, exits)
        self.num_exited += count
        return exit_mask

    @property
    def all_exited(self) -> bool:
        """Whether every token of the pass has exited."""
        return self.num_exited == self.exit_layers_of_pass.numel()

    def score(self, exit_point: ExitPoint, hidden_states: Tensor) -> Tensor:
        """(..., D) hidden states -> (...) exit scores in float32."""
        if self.exit_criterion == "fixed":
            return torch.full(hidden_states.shape[:-1], float("inf"), device=hidden_states.device)
        if self.exit_criterion == "confidence":
            return self.unembed(exit_point.head(hidden_states)).float().softmax(dim=-1).amax(dim=-1)
        return self.unembed.route(exit_point.router, hidden_states)

    def end_pass(self) -> None:
        """Record the exit layer of each row."""
        self.per_pass.append(self.exit_layers_of_pass[:, -1].tolist())

    def exited(self, state: Tensor) -> Tensor:
        """(rows, length, 1) mask of the exited tokens, on the device of `state`."""
        return (self.exit_layers_of_pass < self.num_layers).to(state.device)[..., None]


class PropagateRun(ExitRun):
    """An exited token's hidden state is frozen; layers that all tokens skip only fill its K/V.

    Args:
        *args: As [`ExitRun`].
        fill: Writes the K/V of a skipped layer: `kv_cache.fill_skipped` (`propagate`) or `fill_zeros` (`zero_pad`).
        exits_in_prompt: Whether prompt tokens may exit as well. Deeper layers compute their K/V from the frozen
            hidden state, and skip the MLP.
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
        input_states = input_state(args, kwargs)
        if gate.layer_idx == 0:
            self.begin_pass(input_states)
        if self.all_exited:
            self.fill(gate, args, kwargs)
            output, state = None, input_states
        else:
            output = self.execute(gate, args, kwargs)
            state = gate.state_of(output)
            if self.num_exited:
                state = torch.where(self.exited(state), input_states.to(state.device), state)
        executed = gate.layer_idx + 1
        if self.may_exit and not self.all_exited and executed in self.exit_layers:
            self.decide(executed, state)
        if executed == self.num_layers:
            state = self._translate(state)
            self.end_pass()
        return gate.with_state(output, state)

    def tokens_for_mlp(self) -> Tensor | None:
        """The tokens that have not exited, in a pass over several tokens per row."""
        if not self.num_exited or self.all_exited or self.exit_layers_of_pass.shape[1] == 1:
            return None  # for single tokens, gathering costs more than it saves
        self.mlp_tokens_skipped += self.num_exited
        return self.exit_layers_of_pass == self.num_layers

    def _translate(self, state: Tensor) -> Tensor:
        """Apply the exit head of its layer to the last token of each row that has exited."""
        if not self.num_exited:
            return state
        exits, last = self.exit_layers_of_pass[:, -1], state[:, -1:]
        for exit_layer in sorted(set(exits.tolist()) & self.exit_layers):
            rows = (exits == exit_layer).to(state.device)
            head = on_device(self.routers[exit_layer], state).head
            last = torch.where(rows[:, None, None], head(last), last)
        return last if state.shape[1] == 1 else torch.cat([state[:, :-1], last], dim=1)


class PostHocRun(ExitRun):
    """All layers run; the hidden state of the earliest exit replaces the last one (TIDE, Algorithm 1)."""

    def begin_pass(self, hidden_states: Tensor) -> None:
        """Reset the state at the first layer, the exited hidden states included."""
        super().begin_pass(hidden_states)
        self.exited_state: Tensor | None = None

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute one layer; keep the hidden states of exited tokens for the last one."""
        if gate.layer_idx == 0:
            self.begin_pass(input_state(args, kwargs))
        output = self.execute(gate, args, kwargs)
        return gate.with_state(output, self.after_layer(gate.layer_idx + 1, gate.state_of(output)))

    def after_layer(self, executed: int, state: Tensor) -> Tensor:
        """Decide on exits after `executed` layers; after the last one, insert the hidden states of exited tokens."""
        if self.may_exit and not self.all_exited and executed in self.exit_layers:
            exit_mask = self.decide(executed, state[:, -1:])
            if exit_mask is not None:
                exited = on_device(self.routers[executed], state).head(state[:, -1:])
                kept = exited if self.exited_state is None else self.exited_state.to(state.device)
                self.exited_state = torch.where(exit_mask[..., None], exited, kept)
        if executed == self.num_layers:
            if self.exited_state is not None:
                last = torch.where(self.exited(state), self.exited_state.to(state.device), state[:, -1:])
                state = torch.cat([state[:, :-1], last], dim=1)
            self.end_pass()
        return state
