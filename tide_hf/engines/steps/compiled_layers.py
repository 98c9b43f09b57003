"""Compiled decoder layers: `torch.compile` fuses what lies between a layer's matrix products.

Eager decoding spends a fair part of a token's time on starting small operations. The native forward of a layer is
traced as it is, with its K/V as arguments instead of the cache, so that neither the layer's number nor the length of
the sequence is part of the graph: there is nothing to write per family, all layers of a kind share a graph, and
whatever decides about layers (exits, drafts, verification) stays outside. Results differ from eager ones by rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.cache_utils import Cache, DynamicLayer

from ...common.errors import first_line
from ...depth.gates import Gate, LayerGate, input_state
from ...depth.linear_gate import COMPILED, LinearGate
from .fixed_cache import FixedLayer
from .module_facts import hooks_of, settings_of
from .warm_up import WarmUp

MOST_TOKENS = 64  # of a pass, all rows together; longer ones, such as prompts, have little to gain
MOST_GRAPHS = 64  # by numbers of rows and tokens, with and without a mask, behind a rollback and not
HEADS_AND_SIZE = [1, 3]  # dimensions of K/V that are the model's own

logger = logging.getLogger(__name__)


class CompiledLayers:
    """Runs layers compiled where it can, and natively where it cannot.

    Args:
        backend: Of `torch.compile`.

    Attributes:
        num_compiled: Layers that ran compiled so far.
        warm_up: What compiling took.
        refused: Why kinds of layer cannot be compiled, by class.
    """

    _parts: list[tuple]
    _settings: list[tuple]
    _twins: dict[nn.Module, nn.Module | None]
    _linears: dict[nn.Module, list[_Linear]]
    _compiled: Callable[..., Any]
    _compiled_fixed: Callable[..., Any]

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend
        self.num_compiled = 0
        self.warm_up = WarmUp("Compiling decoder layers", "graphs")
        self.refused: dict[type, str] = {}
        self.release()

    def run(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer as `gate.native` would."""
        layer: Any = gate.module
        num_tokens = input_state(args, kwargs).shape[:2].numel()
        place = place_of_cache(args, kwargs)
        if place is None or num_tokens > MOST_TOKENS or gate.replaced is not None or layer.training:
            return gate.native(*args, **kwargs)
        stored = cache_at(place, args, kwargs).layers[gate.layer_idx]
        # A single stored token would be a graph of its own, since a size of 1 broadcasts.
        if type(layer) in self.refused or not _is_plain(stored) or stored.keys.shape[-2] < 2:
            return gate.native(*args, **kwargs)
        if is_in_torch_dispatch_mode():  # somebody looks at every operation
            return gate.native(*args, **kwargs)
        twin = self._twin_of(layer)
        if twin is None:
            return gate.native(*args, **kwargs)
        for linear in self._linears[layer]:
            linear.prepare(num_tokens)
        call = placed(None, place, args, kwargs)
        graphs, start = _graphs_compiled(), perf_counter()
        try:
            if isinstance(stored, FixedLayer):
                where = stored.cursor
                for tensor in (stored.keys, stored.values):  # in K/V that grow, the new ones' sizes say as much
                    torch._dynamo.mark_static(tensor, HEADS_AND_SIZE)
                tensors = (stored.keys, stored.values, where.slots, where.start)
                output = self._compiled_fixed(twin, *call, place, *tensors)
            else:
                output, stored.keys, stored.values = self._compiled(twin, *call, place, stored.keys, stored.values)
        except RuntimeError as error:  # of Dynamo, of Inductor, or of a missing C++ compiler
            self._refuse(type(layer), error)
            return gate.native(*args, **kwargs)
        self.num_compiled += 1
        if (new := _graphs_compiled() - graphs) > 0:
            seconds = perf_counter() - start
            self.warm_up.add(new, seconds)
            logger.info("compiled %d graphs for a pass over %d tokens: %.1f s", new, num_tokens, seconds)
        return output

    @contextmanager
    def ready(self, layers: list[nn.Module]) -> Iterator[None]:
        """What a call of `generate` has to be inside of; modules that were replaced since the last one are noticed."""
        modules = [module for layer in layers for module in layer.modules()]
        parts = [(id(module), id(module.__dict__.get("forward")), hooks_of(module)) for module in modules]
        if parts != self._parts:
            self.release()
            self._parts, self._layer_numbers = parts, _layer_numbers(layers)
            # Graphs belong to a function's code: with code of its own a model shares no limit with others.
            own = FunctionType(_run_layer.__code__.replace(), globals())
            self._compiled = torch.compile(own, fullgraph=True, dynamic=True, backend=self.backend)
            own = FunctionType(layer_on_fixed_cache.__code__.replace(), globals())
            self._compiled_fixed = torch.compile(own, fullgraph=True, dynamic=True, backend=self.backend)
        settings = [settings_of(module) for module in modules]
        if settings != self._settings:  # twins have those of before; Dynamo knows which graphs hold for which
            self._twins, self._linears, self._settings = {}, {}, settings
        many = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS)
        # The other numbers of a module, such as its heads, are constants of a graph, which is simpler and made sooner.
        dynamo: Any = torch.compiler.config
        changing = ",".join(filter(None, (dynamo.dynamic_sources, self._layer_numbers)))
        numbers = dynamo.patch(dynamic_sources=changing)
        # Sizes that are the same by chance, such as rows and heads, would each make a graph of their own.
        shapes: Any = torch.fx.experimental._config
        no_chance = shapes.patch(use_duck_shape=False)
        with self.warm_up.shown(is_due=not self._twins), many, numbers, no_chance:
            yield

    def release(self) -> None:
        """Give the memory of the graphs back."""
        self._parts, self._settings, self._twins, self._linears = [], [], {}, {}
        self._layer_numbers = ""
        self._compiled, self._compiled_fixed = _run_layer, layer_on_fixed_cache

    def __reduce__(self) -> tuple:
        """Copies and pickles of a model compile for themselves."""
        return CompiledLayers, (self.backend,)

    def _twin_of(self, layer: nn.Module) -> nn.Module | None:
        """What is traced; `None` where there are hooks inside, which Dynamo takes to be the same for all layers."""
        if layer not in self._twins:
            has_hooks = any(hooks_of(module) for module in layer.modules() if module is not layer)
            twin = self._twins[layer] = None if has_hooks else _twin(layer)
            self._linears[layer] = [part for part in twin.modules() if isinstance(part, _Linear)] if twin else []
        return self._twins[layer]

    def _refuse(self, kind: type, error: RuntimeError) -> None:
        reason = first_line(error)
        self.refused[kind] = reason
        logger.warning("%s cannot be compiled and runs eagerly: %s", kind.__name__, reason)


class _LayerCache:
    """What a layer sees of the cache while it is traced: its own K/V."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `DynamicLayer.update`."""
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values

    def get_seq_length(self, *_args: Any) -> int:
        """Tokens that are stored."""
        return self.keys.shape[-2]


class _FixedLayerCache:
    """As `_LayerCache`, of K/V that stay in place."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, start: Tensor) -> None:
        self.keys, self.values, self.slots, self.start = keys, values, slots, start

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `FixedLayer.update`."""
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_args: Any) -> Tensor:
        """Tokens in front of the pass."""
        return self.start


class _Linear(nn.Module):
    """A linear layer with a gate, as it is traced."""

    def __init__(self, gate: LinearGate) -> None:
        super().__init__()
        self.gate = gate
        self._parameters = gate.module._parameters  # shared, so that weights that are replaced are replaced here
        self.form: int | None = None

    def prepare(self, rows: int) -> None:
        """Have the weights in the form that a pass over so many rows is to read."""
        kept = self.gate.prepare(rows, COMPILED)
        self.form = None if kept is None else kept.number

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        weight: Any = self.weight
        bias: Any = self.bias
        if self.form is None:
            return functional.linear(input, weight, bias)
        return torch.ops.tide_hf.linear(input, weight, bias, self.form)


def _run_layer(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, keys: Tensor, values: Tensor
) -> tuple[Any, Tensor, Tensor]:
    """A layer's own forward, with its K/V at the `place` of the cache among its arguments."""
    cache = _LayerCache(keys, values)
    args, kwargs = placed(cache, place, args, kwargs)
    return layer.forward(*args, **kwargs), cache.keys, cache.values


def layer_on_fixed_cache(
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: int | str,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    start: Tensor,
) -> Any:
    """A layer's own forward as it is, writing to `slots` of K/V that stay in place."""
    args, kwargs = placed(_FixedLayerCache(keys, values, slots, start), place, args, kwargs)
    return layer.native(*args, **kwargs) if isinstance(layer, Gate) else layer.forward(*args, **kwargs)


def _twin(module: nn.Module) -> nn.Module:
    """A module that shares everything with `module` but the gates: each gate would make a graph of its own."""
    gate = module.__dict__.get("forward")
    if isinstance(gate, LinearGate):
        return _Linear(gate)
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    if isinstance(gate, Gate):
        del twin.__dict__["forward"]
    children = module._modules.items()
    twin.__dict__["_modules"] = {name: child if child is None else _twin(child) for name, child in children}
    return twin


def _layer_numbers(layers: list[nn.Module]) -> str:
    """The attributes that number layers, as Dynamo is told that they change from one to the next."""
    found = [
        {name for part in layer.modules() for name, value in vars(part).items() if type(value) is int and value == n}
        for n, layer in enumerate(layers)
    ]
    names = sorted(set.intersection(*found))
    return rf".*\.({'|'.join(names)})$" if names else ""


def _is_plain(stored: Any) -> bool:
    """Whether a cache layer holds K/V, and nothing but them."""
    return type(stored) in (DynamicLayer, FixedLayer) and stored.is_initialized


def place_of_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Where the cache stands among a layer's arguments: a position, a name, or nowhere."""
    for name, value in kwargs.items():
        if isinstance(value, Cache):
            return name
    return next((i for i, value in enumerate(args) if isinstance(value, Cache)), None)


def cache_at(place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache, which stands at that place."""
    return args[place] if isinstance(place, int) else kwargs[place]


def placed(
    cache: Any, place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments with `cache` at its `place` among them."""
    if isinstance(place, str):
        return args, {**kwargs, place: cache}
    return (*args[:place], cache, *args[place + 1 :]), kwargs


def _graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
