"""Gates in front of decoder layers and their MLPs, which let a forward pass skip some of them.

A gate stands in for a module's `forward` as an instance attribute, so the model's own forward, its masks, rotary
embeddings and final norm run as ever. Without an active `LayerRun` a gate is transparent. The active run is a context
variable, so every thread and every `generate` call has its own. What `torch.compile` traces has none: there a model is
its own forward, without graph breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from ..base_model.structure import DecoderStructure
from ..kernels.ops import PLAIN, Ops
from ..routers.exit_points import BlockPoint, ExitPoint

_ACTIVE: ContextVar[LayerRun | None] = ContextVar("tide_hf_layer_run", default=None)


class Gate:
    """Stands in for a module's `forward`.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced = module.__dict__.get("forward")  # accelerate puts its own forward on the instance

    def native(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as if there were no gate."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def open(self) -> None:
        """Put the gate in front of its module."""
        self.module.forward = self  # type: ignore[assignment]  # each kind is called in its own way

    def remove(self) -> None:
        """Take it away and put back what it replaced."""
        del self.module.forward
        if self.replaced is not None:
            self.module.forward = self.replaced


class LayerGate(Gate):
    """Stands in for one decoder layer's `forward`.

    Args:
        layer: The decoder layer.
        layer_idx: Its 0-based position.
        returns_tuple: Whether it returns `(hidden_states, ...)`.
    """

    def __init__(self, layer: nn.Module, layer_idx: int, returns_tuple: bool) -> None:
        super().__init__(layer)
        self.layer_idx = layer_idx
        self.returns_tuple = returns_tuple

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the active run decide; without one, or in a pass that is none of its own, run the layer."""
        run = active_run()
        if run is None or not (run.owns(kwargs) or any(value is run.cache for value in args)):
            return self.native(*args, **kwargs)
        return run.run_layer(self, args, kwargs)

    def with_state(self, output: Any, state: Tensor) -> Any:
        """`output` with `state` for its hidden states; for a skipped layer, `output` is None."""
        if not self.returns_tuple:
            return state
        return (state, *output[1:]) if output is not None else (state, None)

    def state_of(self, output: Any) -> Tensor:
        """The hidden states in a layer's output."""
        return output[0] if self.returns_tuple else output


class MLPGate(Gate):
    """Stands in for the `forward` of a decoder layer's MLP, which treats every token by itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the active run choose the tokens; without one, run the MLP on all."""
        run = active_run()
        kept = run.tokens_for_mlp() if run is not None else None
        if run is None or kept is None:
            return self.native(*args, **kwargs)
        if len(args) + len(kwargs) == 1 and run.ops.run_on(input_state(args, kwargs)):
            return self._on_compacted(kept, input_state(args, kwargs), run.ops)
        return self._on_some(kept, args, kwargs)

    def _on_compacted(self, kept: Tensor, hidden_states: Tensor, ops: Ops) -> Any:
        """As `_on_some`, with kernels."""
        rows, indices, counts = ops.exit_compact(hidden_states.flatten(0, 1), ~kept.to(hidden_states.device).flatten())
        staying = int(counts[0])
        output = self.native(rows[None, :staying])
        state = output[0] if isinstance(output, tuple) else output
        scattered = state.new_zeros((rows.shape[0], state.shape[-1]))
        ops.exit_scatter(state.flatten(0, -2), indices[:staying], scattered)
        scattered = scattered.view(*kept.shape, -1)
        return (scattered, *output[1:]) if isinstance(output, tuple) else scattered

    def _on_some(self, kept: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on the tokens of a (rows, length) mask; what stands at the others is zero and of no account."""
        kept = kept.to(input_state(args, kwargs).device)
        args = tuple(_gathered(value, kept) for value in args)
        output = self.native(*args, **{name: _gathered(value, kept) for name, value in kwargs.items()})
        state = output[0] if isinstance(output, tuple) else output  # mixtures of experts return router logits as well
        scattered = state.new_zeros((*kept.shape, state.shape[-1]))
        scattered[kept] = state.reshape(-1, state.shape[-1])
        return (scattered, *output[1:]) if isinstance(output, tuple) else scattered


def _gathered(value: Any, kept: Tensor) -> Any:
    """The kept tokens of a (rows, length, ...) tensor as one row; anything else as it is."""
    return value[kept][None] if isinstance(value, Tensor) and value.shape[:2] == kept.shape else value


def open_gates(structure: DecoderStructure) -> None:
    """Put a gate in front of every decoder layer and every MLP."""
    for layer_idx, layer in enumerate(structure.layers):
        LayerGate(layer, layer_idx, structure.returns_tuple).open()
    for mlp in structure.mlps:
        MLPGate(mlp).open()


def remove_gates(structure: DecoderStructure) -> None:
    """Take the gates away and put back what they replaced."""
    for module in (*structure.layers, *structure.mlps):
        gate = module.__dict__.get("forward")
        if isinstance(gate, Gate):
            gate.remove()


@contextmanager
def active(run: LayerRun | None) -> Iterator[LayerRun | None]:
    """Let `run` decide for every layer that this thread calls; with `None` all run at full depth."""
    token = _ACTIVE.set(run)
    try:
        yield run
    finally:
        _ACTIVE.reset(token)


def active_run() -> LayerRun | None:
    """The run that decides in this thread, if any."""
    return None if torch.compiler.is_dynamo_compiling() else _ACTIVE.get()


class LayerRun:
    """Decides layer by layer. This one executes every layer and counts.

    Args:
        structure: The base model's structure.
        cache: The cache of the call. A pass with another cache is none of the call's own (classifier-free guidance
            runs such passes from a logits processor) and stays at full depth.

    Attributes:
        layers_executed: Layers that ran to their end, once per row.
        ops: What is run where kernels fuse several steps.
        execute_layer: Runs a layer, given its gate and arguments; natively if nothing else is set.
    """

    ops = PLAIN
    execute_layer: Callable[[LayerGate, tuple[Any, ...], dict[str, Any]], Any] | None = None

    def __init__(self, structure: DecoderStructure, cache: Any = None) -> None:
        self.num_layers = structure.num_layers
        self.cache = cache
        self.layers_executed = 0

    def owns(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call of the model, or of a layer, with these arguments is one of this run's."""
        return self.cache is None or any(value is self.cache for value in kwargs.values())

    @contextmanager
    def reading_into(self, cache: Any) -> Iterator[None]:
        """Take passes over another cache, an empty one for some of the call's rows, for the call's own."""
        whole, self.cache = self.cache, cache
        try:
            yield
        finally:
            self.cache = whole

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand in for one layer's forward."""
        return self.execute(gate, args, kwargs)

    def tokens_for_mlp(self) -> Tensor | None:
        """(rows, length) mask of the tokens that the MLP of the current layer has to see; `None` for all."""
        return None

    def execute(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer and count it."""
        self.layers_executed += input_state(args, kwargs).shape[0]
        return self.run_whole(gate, args, kwargs)

    def run_whole(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer."""
        if self.execute_layer is None or self.tokens_for_mlp() is not None:
            return gate.native(*args, **kwargs)
        return self.execute_layer(gate, args, kwargs)


@dataclass(frozen=True)
class LayerCall:
    """With what a layer was called.

    Attributes:
        args: Its positional arguments, the hidden states among them or in `kwargs`.
        kwargs: Its keyword arguments: masks, positions, the cache.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def state(self) -> Tensor:
        """(rows, width, D) hidden states."""
        return input_state(self.args, self.kwargs)

    def with_state(self, state: Tensor) -> LayerCall:
        """The same call with other hidden states."""
        if self.args:
            return LayerCall((state, *self.args[1:]), self.kwargs)
        return LayerCall((), {**self.kwargs, "hidden_states": state})

    def on(self, device: torch.device) -> LayerCall:
        """The same call with all tensors on one device; a model may be spread over several."""
        values = (value if isinstance(value, tuple) else (value,) for value in (*self.args, *self.kwargs.values()))
        if all(part.device == device for value in values for part in value if isinstance(part, Tensor)):
            return self
        return LayerCall(send_to_device(self.args, device), send_to_device(self.kwargs, device))


class _Left(BaseException):
    """Carries the call of the first layer that is not needed out of a forward pass."""

    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.call = call


class FixedDepthRun(LayerRun):
    """A pass ends after `exit_layer` layers. Deeper layers, and their K/V, stay as they are."""

    def __init__(self, structure: DecoderStructure, cache: Any, exit_layer: int) -> None:
        super().__init__(structure, cache)
        self.exit_layer = exit_layer

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the shallow layers, then leave the model."""
        if gate.layer_idx == self.exit_layer:
            raise _Left(LayerCall(args, kwargs))
        return self.execute(gate, args, kwargs)

    def call_after(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> LayerCall:
        """Call `forward`, which calls the model; return what the layer behind the exit would have been called with."""
        try:
            forward(*args, **kwargs)
        except _Left as left:
            return left.call
        raise AssertionError("a forward pass ended without its deeper layers")  # a bug of ours, not of a user


def input_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a layer was called with."""
    return args[0] if args else kwargs["hidden_states"]


Point = TypeVar("Point", ExitPoint, BlockPoint)


def on_device(point: Point, state: Tensor) -> Point:
    """Move an exit point to where its layer's output lies; a model may be spread over devices."""
    if next(point.parameters()).device != state.device:
        point.to(state.device)
    return point
