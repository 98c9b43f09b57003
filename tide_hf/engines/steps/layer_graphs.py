"""Graphs of decoder layers: each layer is traced by itself, and equal layers share a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from ...depth.gates import LayerGate
from .fused_linears import LinearWeights, call_kernels, fuse_linears, layouts_of, quantized_tensors
from .operation_log import OperationLog
from .step_graphs import lift_constants, traced


class LayerArguments:
    """A layer's arguments, split into tensors and other values.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Attributes:
        place: Index or name of the cache argument; `None` without one.
        cache: The cache.
        tensors: The tensor arguments.
        leaves: The flattened arguments (pytree), without the cache.
        tree_spec: The pytree structure of the leaves.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.place: Any = place_of_cache(args, kwargs)
        without = (args, kwargs)
        if self.place is not None:
            self.cache, without = cache_at(self.place, args, kwargs), placed(None, self.place, args, kwargs)
        self.leaves, self.tree_spec = tree_flatten(without)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def rebuilt(self, tensors: Sequence[Tensor], cache: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors, and another cache."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree_spec)
        return placed(cache, self.place, args, kwargs)


class LayerGraph:
    """A compiled graph bound to one layer's constants.

    Args:
        function: Takes inputs and `constants`; returns a tuple.
        constants: Weights, K/V and other tensors at fixed addresses.
        fused: Fused products, whose weights are among the constants.
        quantized: Products by quantised weights, which `function` takes after the constants.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        constants: list[Tensor],
        fused: list[LinearWeights],
        quantized: list[LinearWeights],
    ) -> None:
        self.function = function
        self.layouts = layouts_of(fused, constants), layouts_of(quantized, constants)
        self.constants = [*(tensor.detach() for tensor in constants), *quantized_tensors(self.layouts[1])]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the layer."""
        found: tuple[Tensor, ...] = self.function(*inputs, *self.constants)
        return found


class LayerGraphs:
    """Compiles the graphs of layers.

    Args:
        compile_graph: Compiles a graph, given its inputs.
        trace: Traces a function, given its inputs.

    Attributes:
        has_room: Whether there is memory for one more copy of the weights.
    """

    def __init__(
        self,
        compile_graph: Callable[..., Callable[..., Any]],
        trace: Callable[..., fx.GraphModule] = traced,
    ) -> None:
        self._compile, self._trace = compile_graph, trace
        self._compiled: dict[tuple, Callable[..., Any]] = {}
        # By operations: the compiled graph, the order of its constants, its fused and its quantised products.
        self._by_operations: dict[
            tuple, tuple[Callable[..., Any], list[int], list[LinearWeights], list[LinearWeights]]
        ] = {}
        self.has_room = False

    @property
    def num_compiled(self) -> int:
        """Number of graphs compiled so far."""
        return len(self._compiled)

    def graph_of(self, function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> LayerGraph:
        """The graph of a layer.

        Args:
            function: Runs the layer on `inputs`; other tensors that it reads or writes have fixed addresses.
            inputs: Tensors that change from pass to pass.
        """
        with OperationLog(inputs) as log:  # a tenth of the cost of a trace, and most layers are equal
            function(*inputs)
        operations = log.key
        if operations in self._by_operations:
            compiled, order, *products = self._by_operations[operations]
            return LayerGraph(compiled, [log.constants[i] for i in order], *products)
        graph, constants = lift_constants(self._trace(function, *inputs))
        fused = fuse_linears(graph, constants, self.has_room)
        quantized = call_kernels(graph, constants)
        taken = [*inputs, *constants, *quantized_tensors(layouts_of(quantized, constants))]
        kind = (graph.code, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in taken))
        if kind not in self._compiled:
            self._compiled[kind] = self._compile(graph, taken)
        known = {id(tensor): i for i, tensor in enumerate(log.constants)}
        if all(id(tensor) in known for tensor in constants):
            order = [known[id(tensor)] for tensor in constants]
            self._by_operations[operations] = self._compiled[kind], order, fused, quantized
        return LayerGraph(self._compiled[kind], constants, fused, quantized)


class _StaticLayerCache:
    """Stands for the static cache while a layer is traced, with that layer's K/V alone."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, start: Tensor) -> None:
        self.keys, self.values, self.slots, self.start = keys, values, slots, start

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `StaticKVLayer.update`."""
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_args: Any) -> Tensor:
        """Number of tokens before the pass."""
        return self.start


def layer_on_static_cache(
    gate: LayerGate,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: int | str,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    start: Tensor,
) -> Any:
    """Run a layer's own forward, writing to `slots` of K/V at fixed addresses."""
    args, kwargs = placed(_StaticLayerCache(keys, values, slots, start), place, args, kwargs)
    return gate.native(*args, **kwargs)


def place_of_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Index or name of the cache among a layer's arguments, or `None`."""
    for name, value in kwargs.items():
        if isinstance(value, Cache):
            return name
    return next((i for i, value in enumerate(args) if isinstance(value, Cache)), None)


def cache_at(place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache argument at that place."""
    return args[place] if isinstance(place, int) else kwargs[place]


def placed(
    cache: Any, place: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments with `cache` at its `place` among them."""
    if isinstance(place, str):
        return args, {**kwargs, place: cache}
    return (*args[:place], cache, *args[place + 1 :]), kwargs
