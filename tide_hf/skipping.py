"""The one place that touches decoder layers: gates that let a forward pass skip some of them.

A gate stands in for a layer's `forward` as an instance attribute, so the model's own forward, its masks, rotary
embeddings and final norm run as ever. Without an active `LayerRun` a gate is transparent. The active run is a context
variable, so every thread and every `generate` call has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from . import kv_cache
from .modeling_tide import ExitPoint, TIDERouters
from .structure import DecoderStructure
from .unembed import Unembed

_ACTIVE: ContextVar[LayerRun | None] = ContextVar("tide_hf_layer_run", default=None)


class LayerGate:
    """Stands in for one decoder layer's `forward`.

    Args:
        layer: The decoder layer.
        layer_idx: Its 0-based position.
        returns_tuple: Whether it returns `(hidden_states, ...)`.
    """

    def __init__(self, layer: nn.Module, layer_idx: int, returns_tuple: bool) -> None:
        self.layer = layer
        self.layer_idx = layer_idx
        self.returns_tuple = returns_tuple
        self.replaced = layer.__dict__.get("forward")  # accelerate puts its own forward on the instance

    def native(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as if there were no gate."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the active run decide; without one, run the layer."""
        run = _ACTIVE.get()
        return self.native(*args, **kwargs) if run is None else run.run_layer(self, args, kwargs)

    def with_state(self, output: Any, state: Tensor) -> Any:
        """`output` with `state` for its hidden states; for a skipped layer, `output` is None."""
        if not self.returns_tuple:
            return state
        return (state, *output[1:]) if output is not None else (state, None)

    def state_of(self, output: Any) -> Tensor:
        """The hidden states in a layer's output."""
        return output[0] if self.returns_tuple else output


def open_gates(structure: DecoderStructure) -> None:
    """Put a gate in front of every decoder layer."""
    for layer_idx, layer in enumerate(structure.layers):
        layer.forward = LayerGate(layer, layer_idx, structure.returns_tuple)


def remove_gates(structure: DecoderStructure) -> None:
    """Take the gates away and put back what they replaced."""
    for layer in structure.layers:
        gate = layer.__dict__.get("forward")
        if isinstance(gate, LayerGate):
            del layer.forward
            if gate.replaced is not None:
                layer.forward = gate.replaced


@contextmanager
def active(run: LayerRun) -> Iterator[LayerRun]:
    """Let `run` decide for every layer that this thread calls."""
    token = _ACTIVE.set(run)
    try:
        yield run
    finally:
        _ACTIVE.reset(token)


class LayerRun:
    """Decides layer by layer. This one executes every layer and counts.

    Attributes:
        layers_executed: Layers that ran to their end, once per row.
    """

    def __init__(self, structure: DecoderStructure) -> None:
        self.num_layers = structure.num_layers
        self.layers_executed = 0

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for one layer's forward."""
        return self.execute(gate, args, kwargs)

    def execute(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer natively and count it."""
        self.layers_executed += _input_state(args, kwargs).shape[0]
        return gate.native(*args, **kwargs)


class FixedDepthRun(LayerRun):
    """Every token leaves after `exit_layer` layers through that layer's head. Deeper K/V stay as they are."""

    def __init__(self, structure: DecoderStructure, exit_layer: int, exit_point: ExitPoint, unembed: Unembed) -> None:
        super().__init__(structure)
        self.exit_layer = exit_layer
        self.exit_point = exit_point
        self.unembed = unembed
        self.exit_scores: Tensor | None = None

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the shallow layers; at the last position translate the state for the final norm."""
        if gate.layer_idx < self.exit_layer:
            return self.execute(gate, args, kwargs)
        state = _input_state(args, kwargs)
        if gate.layer_idx == self.exit_layer:
            exit_point = _on_device(self.exit_point, state)
            self.exit_scores = exit_point.router(self.unembed.normalize(state[:, -1]))
        if gate.layer_idx == self.num_layers - 1:
            state = self.exit_point.head(state)
        return gate.with_state(None, state)


class RouterRun(LayerRun):
    """Tokens leave where a router's score reaches the threshold. Common to `early_exit` and `post_hoc`.

    Only passes of one token per row may exit: the prompt runs at full depth.

    Args:
        structure: The base model's structure.
        routers: Its routers.
        unembed: Its unembedding, for the final norm in front of the routers.
        exit_threshold: Exit where `score >= exit_threshold`.

    Attributes:
        exit_layer_per_row: (rows,) exit layer of each row in the current pass; `num_layers` where none.
        per_pass: One list of exit layers per forward pass so far.
    """

    def __init__(
        self, structure: DecoderStructure, routers: TIDERouters, unembed: Unembed, exit_threshold: float
    ) -> None:
        super().__init__(structure)
        self.routers = routers
        self.unembed = unembed
        self.exit_threshold = exit_threshold
        self.exit_layers = frozenset(routers.exit_layers)
        self.exit_layer_per_row = torch.empty(0, dtype=torch.long)
        self.may_exit = False
        self.num_exited = 0
        self.per_pass: list[list[int]] = []

    def begin_pass(self, hidden_states: Tensor) -> None:
        """Start afresh with the first layer of a forward pass."""
        rows, length = hidden_states.shape[:2]
        self.may_exit = length == 1
        self.num_exited = 0
        self.exit_layer_per_row = torch.full((rows,), self.num_layers, device=hidden_states.device)

    def decide(self, exit_layer: int, hidden_states: Tensor) -> Tensor | None:
        """Score the rows that are still in the pass; return the mask of those that leave here, if any does."""
        exit_point = _on_device(self.routers[exit_layer], hidden_states)
        scores = exit_point.router(self.unembed.normalize(hidden_states[:, -1]))
        self.exit_layer_per_row = self.exit_layer_per_row.to(hidden_states.device)
        leaves = (scores >= self.exit_threshold) & (self.exit_layer_per_row == self.num_layers)
        count = int(leaves.sum())
        if count == 0:
            return None
        self.exit_layer_per_row = torch.where(leaves, exit_layer, self.exit_layer_per_row)
        self.num_exited += count
        return leaves

    def end_pass(self) -> None:
        """Note the layer that each row was read from."""
        self.per_pass.append(self.exit_layer_per_row.tolist())


class EarlyExitRun(RouterRun):
    """A token that leaves stops there: deeper layers only store its K/V, unless another row still needs them."""

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute, freeze or skip one layer."""
        before = _input_state(args, kwargs)
        if gate.layer_idx == 0:
            self.begin_pass(before)
        if self.num_exited == before.shape[0]:
            kv_cache.fill_skipped(gate.native, args, kwargs)
            output, state = None, before
        else:
            output = self.execute(gate, args, kwargs)
            state = gate.state_of(output)
            if self.num_exited:
                exited = (self.exit_layer_per_row < self.num_layers).to(state.device)
                state = torch.where(exited[:, None, None], before.to(state.device), state)
        executed = gate.layer_idx + 1
        if self.may_exit and self.num_exited < state.shape[0] and executed in self.exit_layers:
            self.decide(executed, state)
        if executed == self.num_layers:
            state = self._translate(state)
            self.end_pass()
        return gate.with_state(output, state)

    def _translate(self, state: Tensor) -> Tensor:
        """Pass each exited row through the head of its exit layer."""
        for exit_layer in sorted(set(self.exit_layer_per_row.tolist()) & self.exit_layers):
            rows = (self.exit_layer_per_row == exit_layer).to(state.device)
            head = _on_device(self.routers[exit_layer], state).head
            state = torch.where(rows[:, None, None], head(state), state)
        return state


class PostHocRun(RouterRun):
    """All layers run; the state of the earliest exit whose router agrees replaces the last one (Algorithm 1)."""

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute one layer and remember exited states for the last one."""
        if gate.layer_idx == 0:
            self.begin_pass(_input_state(args, kwargs))
            self.exited_state: Tensor | None = None
        output = self.execute(gate, args, kwargs)
        state = gate.state_of(output)
        executed = gate.layer_idx + 1
        if self.may_exit and executed in self.exit_layers:
            leaves = self.decide(executed, state)
            if leaves is not None:
                head = _on_device(self.routers[executed], state).head
                kept = state if self.exited_state is None else self.exited_state.to(state.device)
                self.exited_state = torch.where(leaves[:, None, None], head(state), kept)
        if executed == self.num_layers:
            if self.exited_state is not None:
                exited = (self.exit_layer_per_row < self.num_layers).to(state.device)
                state = torch.where(exited[:, None, None], self.exited_state.to(state.device), state)
            self.end_pass()
        return gate.with_state(output, state)


def _input_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _on_device(exit_point: ExitPoint, state: Tensor) -> ExitPoint:
    """Move an exit point to where its layer's output lies; a model may be spread over devices."""
    if exit_point.router.up.weight.device != state.device:
        exit_point.to(state.device)
    return exit_point
