"""Gates on decoder layers, which let a forward pass skip layers.

A gate replaces a module's `forward` as an instance attribute, so the model's own forward, its masks, rotary embeddings
and final norm run unchanged. Without an active `LayerRun`, a gate calls the module's own `forward`. The active run is a
context variable, so each thread has its own. Under `torch.compile` no run is active, which avoids graph breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..base_model.structure import DecoderStructure
from ..routers.draft_head import DraftHead
from ..routers.exit_points import ExitPoint
from .kv_cache import order_prefetch

# Runs a layer, given its gate and arguments.
ExecuteLayer = Callable[["LayerGate", tuple[Any, ...], dict[str, Any]], Any]

ACTIVE_RUN: ContextVar[LayerRun | None] = ContextVar("tide_hf_layer_run", default=None)


class Gate:
    """Replaces a module's `forward`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced = module.__dict__.get("forward")  # accelerate sets its own forward on the instance

    def native(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def open(self) -> None:
        """Install the gate on its module."""
        self.module.forward = self  # type: ignore[assignment]  # subclasses have other signatures

    def remove(self) -> None:
        """Remove the gate and restore the `forward` that it replaced."""
        del self.module.forward
        if self.replaced is not None:
            self.module.forward = self.replaced


class LayerGate(Gate):
    """Replaces one decoder layer's `forward`; `returns_tuple`: whether the layer returns `(hidden_states, ...)`."""

    def __init__(self, layer: nn.Module, layer_idx: int, returns_tuple: bool) -> None:
        super().__init__(layer)
        self.layer_idx = layer_idx
        self.returns_tuple = returns_tuple

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the active run decide. Without a run, or in a pass over another cache, run the layer."""
        run = active_run()
        if run is None or not (run.owns(kwargs) or any(value is run.cache for value in args)):
            return self.native(*args, **kwargs)
        return run.run_layer(self, args, kwargs)

    def with_state(self, output: Any, state: Tensor) -> Any:
        """Replace the hidden states in a layer's output. For a skipped layer, `output` is `None`."""
        if not (self.returns_tuple if output is None else isinstance(output, tuple)):
            return state
        return (state, *output[1:]) if output is not None else (state, None)

    def state_of(self, output: Any) -> Tensor:
        """The hidden states in a layer's output."""
        return output[0] if isinstance(output, tuple) else output


def open_gates(structure: DecoderStructure) -> None:
    """Install a gate on every decoder layer."""
    for layer_idx, layer in enumerate(structure.layers):
        LayerGate(layer, layer_idx, structure.returns_tuple).open()


def remove_gates(structure: DecoderStructure) -> None:
    """Remove the gates and restore the `forward` methods that they replaced."""
    for layer in structure.layers:
        gate = layer.__dict__.get("forward")
        if isinstance(gate, Gate):
            gate.remove()


@contextmanager
def active(run: LayerRun | None) -> Iterator[LayerRun | None]:
    """Make `run` decide for every layer that this thread calls; with `None`, every layer runs."""
    token = ACTIVE_RUN.set(run)
    try:
        yield run
    finally:
        ACTIVE_RUN.reset(token)


def active_run() -> LayerRun | None:
    """The active run of this thread, if any."""
    return None if torch.compiler.is_dynamo_compiling() else ACTIVE_RUN.get()


class LayerRun:
    """Decides what each layer does. The base class executes every layer.

    A pass with a cache other than the call's does not belong to the call (a logits processor for classifier-free
    guidance runs such passes) and stays at full depth. `layers_executed` counts each execution once per row.
    `execute_layer` runs a layer, given its gate and arguments; `None` means the layer's own `forward`.
    """

    def __init__(
        self, structure: DecoderStructure, cache: Any = None, *, execute_layer: ExecuteLayer | None = None
    ) -> None:
        self.num_layers = structure.num_layers
        self.cache, self.execute_layer = cache, execute_layer
        self.layers_executed = 0

    def owns(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call of the model or of a layer with these arguments belongs to this run."""
        return self.cache is None or any(value is self.cache for value in kwargs.values())

    @contextmanager
    def prefilling(self, cache: Any) -> Iterator[None]:
        """Let passes over `cache`, an empty cache in which some rows of the call are prefilled, belong to this run."""
        own, self.cache = self.cache, cache
        try:
            yield
        finally:
            self.cache = own

    def starts(self, kwargs: dict[str, Any]) -> None:
        """Called with the model's arguments at the start of each pass that belongs to this run."""

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer, in place of its `forward`."""
        return self.execute(gate, args, kwargs)

    def joined_layers(self, layer_idx: int) -> int:
        """Up to how many layers, counted from the first, may run in one call with a layer that is executed.

        The run neither reads nor changes the states between them.
        """
        return self.num_layers if type(self).run_layer is LayerRun.run_layer else layer_idx + 1

    def taps_in(self, begin: int, end: int) -> list[int]:
        """Of layers that run in one call, from `begin` + 1 to `end`, those after which the run reads the states."""
        return []

    def take_tapped(self, depths: list[int], tapped: Tensor) -> None:
        """Take these states of the current pass, (rows, width, number of depths, D)."""

    def count_joined(self, rows: int, layers: int) -> None:
        """Count layers that have run in one call with another and were not called."""
        self.layers_executed += rows * layers

    def execute(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer and count it."""
        state = input_state(args, kwargs)
        self.layers_executed += state.shape[max(0, state.dim() - 3)]  # Gemma 3n stacks several states before the rows
        order_prefetch(self.cache, state.device)
        if self.execute_layer is None:
            return gate.native(*args, **kwargs)
        return self.execute_layer(gate, args, kwargs)


class _DepthReached(BaseException):
    """Ends a forward pass after the last layer that is needed; holds the hidden states there."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states


class FixedDepthRun(LayerRun):
    """A run whose passes end after `exit_layer` layers. Deeper layers and their K/V are not touched."""

    def __init__(self, structure: DecoderStructure, cache: Any, exit_layer: int, **kwargs: Any) -> None:
        super().__init__(structure, cache, **kwargs)
        self.exit_layer = exit_layer

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the layers up to the exit layer, then end the pass."""
        if gate.layer_idx == self.exit_layer:
            raise _DepthReached(input_state(args, kwargs))
        return self.execute(gate, args, kwargs)

    def joined_layers(self, layer_idx: int) -> int:
        """All up to the exit layer."""
        return self.exit_layer

    def states_after(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run the model by `forward` up to the exit layer; return the hidden states there, (rows, width, D)."""
        try:
            forward(*args, **kwargs)
        except _DepthReached as reached:
            return reached.hidden_states
        raise AssertionError("the model ended a pass before the exit layer")  # a bug in tide_hf, not a user error


class SegmentRun(FixedDepthRun):
    """A run whose passes execute the layers after the first `begin` alone, up to `exit_layer`, from given states.

    Args, besides those of `FixedDepthRun`:
        begin: Number of layers that the tokens have executed before.
        states: Their hidden states there, (rows, width, D); not read if `begin` is 0.
        finish: Maps the states after the model's last layer to what the final norm reads.
    """

    def __init__(
        self,
        *args: Any,
        begin: int,
        states: Tensor | None,
        finish: Callable[[Tensor], Tensor] = lambda state: state,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.begin, self.states, self.finish = begin, states, finish

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the layers of the segment, then end the pass, except after the model's last layer."""
        given, executed = input_state(args, kwargs), gate.layer_idx + 1
        if executed <= self.begin:
            return gate.with_state(None, self.states if executed == self.begin and self.states is not None else given)
        output = super().run_layer(gate, args, kwargs)
        state = gate.state_of(output)
        return gate.with_state(output, self.finish(state) if executed == self.num_layers else state)


def input_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a layer was called with."""
    return args[0] if args else kwargs["hidden_states"]


Point = TypeVar("Point", ExitPoint, DraftHead)


def on_device(point: Point, state: Tensor) -> Point:
    """Move an exit point to the device of its layer's output, since a model may be spread over devices."""
    if next(point.parameters()).device != state.device:
        point.to(state.device)
    return point
