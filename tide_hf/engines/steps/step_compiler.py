"""Compile steps, and the decoder layers of prefill; layers with equal operations share a compiled graph.

A step of fixed shape is traced at the level of PyTorch's operators, so no model family needs code of its own. In the
trace of the whole step each layer is a single op, which runs the graph of that layer, or its fused kernels.

Prefill spends a fifth to a third of its time outside matrix products, in forty small operations per layer, each of
which reads and writes all tokens. Layers of prefill are compiled for symbolic sizes. Guards on sizes, for example from
the choice of the fastest weight layout, limit the sizes that a graph serves; other sizes get another graph.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ...base_model.structure import CACHE
from ...common.errors import first_line
from ...depth.gates import LayerGate
from ...kernels.compile_cache import compiling
from ...kernels.cpu.cpp_kernels import precompiling_header
from ...weights.fused_layers import FusedLayer, FusedStack
from ..gqa_attention import filled_up_to
from ..warm_up import WarmUp
from .capture import Replay, restorer
from .dequantised_products import reduce_products
from .fused_linears import call_kernels
from .graphs import CompileGraph, LayerGraph, LayerGraphs, in_parts, lift_constants, traced

MAX_PREFILL_GRAPHS = 8  # per layer, for different sizes; further sizes run uncompiled

# Dynamo and Inductor raise RuntimeError, also if there is no compiler or shapes depend on data; a compiled graph raises
# AssertionError if its inputs do not match those that it was compiled for. A trace raises TypeError at a weight of a
# class that it cannot see into, such as bitsandbytes' packed ones.
COMPILE_ERRORS = (RuntimeError, AssertionError, TypeError)

logger = logging.getLogger(__name__)


class LayerArguments:
    """A layer's arguments, flattened as a pytree, and the cache and tensors among them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self.tree_spec = tree_flatten((args, kwargs), is_leaf=lambda value: isinstance(value, Cache))
        self.cache: Any = next((leaf for leaf in self.leaves if isinstance(leaf, Cache)), None)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def others(self) -> list[Any]:
        """The leaves that are neither tensors nor the cache."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, (Tensor, Cache))]

    def rebuilt(self, tensors: Sequence[Tensor], cache: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with `tensors` and `cache` in place of their own."""
        others = iter(tensors)
        leaves = [
            next(others) if isinstance(leaf, Tensor) else cache if isinstance(leaf, Cache) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.tree_spec)
        return args, kwargs


_regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
_numbers = itertools.count()


class Region:
    """What runs one decoder layer in one step, a function of tensors; its output has the shape and dtype of `like`."""

    def __init__(self, function: Callable[..., Tensor], like: Tensor) -> None:
        self.function, self.shape, self.dtype = function, like.shape, like.dtype
        self.number = next(_numbers)
        _regions[self.number] = self


class FusedRegion(Region):
    """Layers that one call of a kernel runs; K/V of each, (rows, KV heads, slots, head_size).

    With several `taps`, numbers of layers, its output is (rows, width, taps, D), the states after each of them.
    """

    def __init__(
        self,
        layers: list[FusedLayer],
        keys: list[Tensor],
        values: list[Tensor],
        state_shape: torch.Size,
        taps: Sequence[int] = (),
    ) -> None:
        self.layers, self.keys, self.values, self._stack = layers, keys, values, FusedStack(layers)
        self.taps = list(taps) if len(taps) > 1 else []
        shape = (*state_shape[:-1], len(taps), state_shape[-1]) if self.taps else state_shape
        super().__init__(self._run, torch.empty(shape, dtype=layers[0].dtype, device="meta"))

    def _run(self, state: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, end: Tensor) -> Tensor:
        tapped = state.new_empty(self.shape) if self.taps else None
        output = self._stack(self.keys, self.values, state, cos, sin, mask, end, tapped=tapped, taps=self.taps)
        return output if tapped is None else tapped


# The op does not declare that it writes K/V, since declared mutations cost Inductor seconds per step. Layers cannot be
# reordered, since each reads the previous layer's output, and `_trace` checks that no layer is eliminated.
_ops = torch.library.Library("tide_hf", "FRAGMENT")
_ops.define("layer(Tensor[] inputs, int region) -> Tensor")


def _run_region(inputs: list[Tensor], region: int) -> Tensor:
    return _regions[region].function(*inputs)


_ops.impl("layer", _run_region, "CompositeExplicitAutograd")


@torch.library.register_fake("tide_hf::layer", lib=_ops)
def _fake_layer(inputs: list[Tensor], region: int) -> Tensor:
    found = _regions[region]
    return inputs[0].new_empty(found.shape, dtype=found.dtype)


LAYER = torch.ops.tide_hf.layer.default


class StepCompiler:
    """Compiles steps, and the layers in them."""

    def __init__(self, compile_graph: CompileGraph) -> None:
        self._compile = compile_graph
        self.graphs = LayerGraphs(compile_graph)
        # Of the step that is compiled: the layers that a kernel runs, by index; whether weights may be copied for it.
        self._fused: dict[int, FusedLayer] = {}
        self._may_copy = False
        self._regions: list[Region | None] | None = None  # set while a step is recorded
        self._to_insert: Iterator[Region | None] | None = None  # set while the step is traced

    def run(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer in place of `gate.native`."""
        inputs = self._inputs_of_kernels(gate, args, kwargs)
        if self._to_insert is not None:
            region = next(self._to_insert)
            if region is None:
                return gate.native(*args, **kwargs)
            taken = inputs or _inputs_of_step(LayerArguments(args, kwargs), gate)
            return gate.with_state(None, torch.ops.tide_hf.layer(taken, region.number))
        if inputs is not None:
            layer = kwargs[CACHE].layers[gate.layer_idx]
            region = FusedRegion([self._fused[gate.layer_idx]], [layer.keys], [layer.values], inputs[0].shape)
            state = region.function(*inputs)
            if self._regions is not None:
                self._regions.append(region)
            return gate.with_state(None, state)
        output = gate.native(*args, **kwargs)  # before tracing, so that weights are in their layouts
        if self._regions is not None:
            self._regions.append(self._region_of(gate, LayerArguments(args, kwargs), gate.state_of(output)))
        return output

    def _inputs_of_kernels(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """The arguments of a [`FusedRegion`]; `None` if kernels do not run this layer."""
        fused = self._fused.get(gate.layer_idx)
        taken = fused.arguments_of(args, kwargs) if fused is not None else None
        if taken is None or taken[-1] is None:  # without a mask, the layer would attend to all slots
            return None
        return [*taken, kwargs[CACHE].layers[gate.layer_idx].position.end]

    def compile(
        self,
        function: Callable[[], Any],
        state: list[Tensor],
        fused: dict[int, FusedLayer] | None = None,
        may_copy: bool = False,
    ) -> Replay:
        """Compile a step; if that fails, return a `Replay` that runs the step uncompiled and says why.

        The step reads and writes tensors at fixed addresses; tensors in `state` are restored after trial runs. A kernel
        runs the layers in `fused`, by index; `may_copy` says whether memory allows a copy of the weights.
        """
        self._fused, self._may_copy = fused or {}, may_copy
        try:
            return self._compiled(function, state)
        finally:
            self._fused, self._may_copy = {}, False

    def _compiled(self, function: Callable[[], Any], state: list[Tensor]) -> Replay:
        restore = restorer(state)
        try:
            with compiling(), torch.inference_mode(False), torch.no_grad():
                regions = self._record(function)
                restore()
                graph, lifted = lift_constants(self._trace(function, regions))
                if any(tensor.device.type != "cpu" for tensor in lifted):
                    reduce_products(graph, lifted)
                call_kernels(graph, lifted)
                constants = [tensor.detach() for tensor in lifted]
                compiled = in_parts(graph, LAYER, self._compile)
                compiled(*constants)
        except COMPILE_ERRORS as error:
            restore()
            return Replay(function, refused=first_line(error))
        restore()

        def run() -> Any:
            with torch.inference_mode(False), torch.no_grad():
                return compiled(*constants)

        return Replay(run, references=regions)

    def _record(self, function: Callable[[], Any]) -> list[Region | None]:
        regions: list[Region | None] = []
        self._regions = regions
        try:
            function()
        finally:
            self._regions = None
        return regions

    def _trace(self, function: Callable[[], Any], regions: list[Region | None]) -> fx.GraphModule:
        self._to_insert = iter(regions)
        try:
            graph = traced(function)
        finally:
            self._to_insert = None
        used = [node for node in graph.graph.nodes if node.target is LAYER and node.users]
        if len(used) < sum(region is not None for region in regions):
            raise RuntimeError("a layer's output is not used")
        _join_layers(graph, regions)
        return graph

    def _region_of(self, gate: LayerGate, arguments: LayerArguments, like: Tensor) -> Region | None:
        """What runs a layer; `None` without a cache."""
        if arguments.cache is None:
            return None
        stored = arguments.cache.layers[gate.layer_idx]

        def layer(*tensors: Tensor) -> tuple[Tensor]:
            *rest, slots, start, end = tensors
            args, kwargs = arguments.rebuilt(rest, _TracedStaticCache(stored.keys, stored.values, slots, start))
            with filled_up_to(end):
                output = gate.native(*args, **kwargs)
            return (gate.state_of(output).contiguous(),)

        graph, _ = self.graphs.graph_of(layer, _inputs_of_step(arguments, gate), may_copy=self._may_copy)

        def function(*inputs: Tensor) -> Tensor:
            (state,) = graph(*inputs)
            return state

        return Region(function, like)


def _join_layers(graph: fx.GraphModule, regions: list[Region | None]) -> None:
    """Let one call run layers that each read the one before; the regions of these calls are added to `regions`."""
    for run in _runs_of_layers(graph):
        parts: list[Any] = [_regions[cast(int, node.args[1])] for node in run]
        taps = [place for place, node in enumerate(run, start=1) if place == len(run) or len(node.users) > 1]
        layers, keys, values = ([getattr(part, name)[0] for part in parts] for name in ("layers", "keys", "values"))
        joined = FusedRegion(layers, keys, values, parts[0].shape, taps)
        regions.append(joined)
        with graph.graph.inserting_before(run[0]):
            call = graph.graph.call_function(LAYER, (run[0].args[0], joined.number))
            places, select = range(len(taps)), torch.ops.aten.select.int
            states = (
                [graph.graph.call_function(select, (call, 2, place)) for place in places] if joined.taps else [call]
            )
        for depth, state in zip(taps, states, strict=True):
            run[depth - 1].replace_all_uses_with(state)
        for node in reversed(run):
            graph.graph.erase_node(node)
    graph.recompile()


def _runs_of_layers(graph: fx.GraphModule) -> list[list[fx.Node]]:
    """Layers that kernels run, in runs of several that read each other's states, and the same angles and mask."""
    runs: list[list[fx.Node]] = []
    before: Any = None
    for node in graph.graph.nodes:
        inputs, number = node.args if node.target is LAYER else ((), -1)
        region = _regions.get(number)
        if not isinstance(region, FusedRegion):
            continue
        if before is not None and inputs == [before[0], *before[1]] and before[2].layers[0].is_like(region.layers[0]):
            runs[-1].append(node)
        else:
            runs.append([node])
        before = node, inputs[1:], region
    return [run for run in runs if len(run) > 1]


def _inputs_of_step(arguments: LayerArguments, gate: LayerGate) -> list[Tensor]:
    """The inputs of a layer that change from pass to pass: its tensor arguments, and the position in the cache."""
    position = arguments.cache.layers[gate.layer_idx].position
    return [*arguments.tensors, position.slots, position.start, position.end]


class _TracedStaticCache:
    """Replaces the static cache while a layer is traced, with that layer's K/V alone."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, start: Tensor) -> None:
        self.keys, self.values, self.slots, self.start = keys, values, slots, start

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_args: Any) -> Tensor:
        return self.start


class CompiledPrefill:
    """Runs the layers of prefill: compiled where possible, else by their own `forward`."""

    def __init__(self, graphs: LayerGraphs, warm_up: WarmUp) -> None:
        self.num_compiled = 0  # number of layer calls that ran compiled so far
        self.refused: dict[type, str] = {}  # why layers cannot be compiled, by class of layer
        self._graphs, self._warm_up = graphs, warm_up
        self._known: defaultdict[tuple, list[LayerGraph]] = defaultdict(list)

    def run(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer in place of `gate.native`."""
        arguments = LayerArguments(args, kwargs)
        is_plain = all(leaf is None or isinstance(leaf, (bool, int, float, str)) for leaf in arguments.others)
        is_own = is_plain and gate.replaced is None and type(gate.module) not in self.refused
        if is_in_torch_dispatch_mode() or not is_own or not _writes_first_tokens(arguments, gate):
            return gate.native(*args, **kwargs)
        inputs = [tensor.contiguous() for tensor in arguments.tensors]
        key = (gate.layer_idx, arguments.tree_spec, *arguments.others, *((x.ndim, x.dtype) for x in inputs))
        known = self._known[key]
        graph = next((graph for graph in known if graph.sizes is not None and graph.sizes.hold(inputs)), None)
        if graph is not None:
            with torch.inference_mode(False), torch.no_grad():
                results = graph(*inputs)
        else:
            found = self._new_graph(gate, arguments, inputs) if len(known) < MAX_PREFILL_GRAPHS else None
            if found is None:
                return gate.native(*args, **kwargs)
            graph, results = found
            known.append(graph)
        state, *stored = results
        if stored:
            arguments.cache.update(*stored, gate.layer_idx)
        self.num_compiled += 1
        return gate.with_state(None, state)

    def _new_graph(
        self, gate: LayerGate, arguments: LayerArguments, inputs: list[Tensor]
    ) -> tuple[LayerGraph, tuple[Tensor, ...]] | None:
        """A graph that serves `inputs`, and its results for them; `None` if the layer cannot be compiled."""

        def layer(*tensors: Tensor) -> tuple[Tensor, ...]:
            cache = _TracedEmptyCache()
            args, kwargs = arguments.rebuilt(tensors, cache)
            state = gate.state_of(gate.native(*args, **kwargs))
            return state.contiguous(), *cache.stored

        start, num_before, found = perf_counter(), self._graphs.num_compiled, None
        try:
            with compiling(), precompiling_header(), torch.inference_mode(False), torch.no_grad():
                graph, results = self._graphs.graph_of(layer, inputs, dynamic=True)
                if self._graphs.num_compiled > num_before:
                    graph(*inputs)  # a graph that does not run is refused
                found = graph, results
        except COMPILE_ERRORS as error:
            self.refused[type(gate.module)] = reason = first_line(error)
            logger.info("%s runs prefill uncompiled: %s", type(gate.module).__name__, reason)
        num_new, seconds = self._graphs.num_compiled - num_before, perf_counter() - start
        self._warm_up.add(num_new, seconds)
        if num_new:
            logger.info("layers of prefill compiled: %.2f s", seconds)
        return found


class _TracedEmptyCache:
    """Replaces an empty cache while a layer is traced."""

    def __init__(self) -> None:
        self.stored: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.stored = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, *_args: Any) -> int:
        return 0


def _writes_first_tokens(arguments: LayerArguments, gate: LayerGate) -> bool:
    """Whether a layer is about to write the first tokens to its part of a dynamic cache."""
    if arguments.cache is None or len(arguments.cache.layers) <= gate.layer_idx:
        return False
    layer = arguments.cache.layers[gate.layer_idx]
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.get_seq_length() == 0
