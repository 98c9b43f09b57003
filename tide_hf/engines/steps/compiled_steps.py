"""Steps as Inductor graphs, for CPUs: one graph for a decoder layer, however many there are of its kind, one around.

A step of fixed shape is traced as it runs, below the model's own Python, so there is nothing to write per family. Each
layer is traced by itself, with its weights and K/V as arguments: layers of a kind come to the same operations and share
what is compiled. In the trace of the whole step each is a single operation.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from ...common.errors import first_line
from ...depth.gates import LayerGate
from ...depth.linear_gate import DRAFT_LAYOUTS, KERNEL_LAYOUTS, LinearGate, allowed_layouts, copies_fit, linear_gates
from ...kernels.compile_cache import compiling
from ...kernels.cpu.weight_layouts import WeightLayout
from ..shared_heads import filled_up_to, shared_heads
from .compiled_prompts import CompiledPrompts
from .fused_linears import call_kernels, layouts_of, quantized_tensors
from .layer_graphs import LayerArguments, LayerGraph, LayerGraphs, layer_on_fixed_cache
from .replay import Replay, restorer
from .step_buffers import Parts, StepBuffers
from .step_graphs import compile_graph, in_parts, lift_constants, traced
from .step_store import StepStore
from .warm_up import WarmUp

logger = logging.getLogger(__name__)

_regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
_numbers = itertools.count()


class Region:
    """One decoder layer in one kind of step.

    Args:
        graph: Takes what changes from pass to pass, and returns the layer's hidden states; in a tuple, which Inductor
            need not take apart and put together.
        like: Hidden states as it returns them.
    """

    def __init__(self, graph: LayerGraph, like: Tensor) -> None:
        self.graph, self.shape, self.dtype = graph, like.shape, like.dtype
        self.number = next(_numbers)
        _regions[self.number] = self


# It writes K/V, and does not say so: telling Inductor costs seconds for each step. Since layers work on each other's
# results they cannot change places, and that none is left out is checked.
_ops = torch.library.Library("tide_hf", "FRAGMENT")
_ops.define("layer(Tensor[] inputs, int region) -> Tensor")


def _run_region(inputs: list[Tensor], region: int) -> Tensor:
    (state,) = _regions[region].graph(*inputs)
    return state


_ops.impl("layer", _run_region, "CompositeExplicitAutograd")


@torch.library.register_fake("tide_hf::layer", lib=_ops)
def _like_region(inputs: list[Tensor], region: int) -> Tensor:
    found = _regions[region]
    return inputs[0].new_empty(found.shape, dtype=found.dtype)


class StepCompiler:
    """Compiles steps, and the layers in them.

    Args:
        compile_graph: Makes a function of a graph and its inputs.

    Attributes:
        graphs: Of layers.
    """

    def __init__(self, compile_graph: Callable[..., Callable[..., Any]]) -> None:
        self.compile_graph = compile_graph
        self.graphs = LayerGraphs(compile_graph)
        self._regions: list[Region | None] | None = None  # while a step is learnt
        self._to_place: Iterator[Region | None] | None = None  # while it is traced

    def run(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer as `gate.native` would."""
        if self._to_place is not None:
            region = next(self._to_place)
            if region is None:
                return gate.native(*args, **kwargs)
            state = torch.ops.tide_hf.layer(_inputs_of(LayerArguments(args, kwargs), gate), region.number)
            return gate.with_state(None, state)
        output = gate.native(*args, **kwargs)  # before it is traced, so that linear layers have their weights' layouts
        if self._regions is not None:
            self._regions.append(self._region_of(gate, args, kwargs, gate.state_of(output)))
        return output

    def replay_of(self, function: Callable[[], Any], state: list[Tensor]) -> Replay:
        """Compile a step.

        Args:
            function: Reads and writes tensors that stay where they are.
            state: Those of them that it changes so that it could not run again; they are put back.
        """
        put_back = restorer(state)
        try:
            with compiling(), torch.inference_mode(False), torch.no_grad():
                regions = self._learn(function)
                put_back()
                graph, lifted = lift_constants(self._trace(function, regions))
                quantized = layouts_of(call_kernels(graph, lifted), lifted)
                constants = [*(tensor.detach() for tensor in lifted), *quantized_tensors(quantized)]
                compiled = in_parts(graph, torch.ops.tide_hf.layer.default, self.compile_graph)
                compiled(*constants)
        # Dynamo and Inductor raise the first, also where there is no compiler or a shape hangs on values; a compiled
        # graph raises the second over inputs that it was not made for.
        except (RuntimeError, AssertionError) as error:
            put_back()
            return Replay(function, refused=first_line(error))
        put_back()

        def run() -> Any:
            with torch.inference_mode(False), torch.no_grad():
                return compiled(*constants)

        return Replay(run, kept=(regions, quantized))

    def _learn(self, function: Callable[[], Any]) -> list[Region | None]:
        regions: list[Region | None] = []
        self._regions = regions
        try:
            function()
        finally:
            self._regions = None
        return regions

    def _trace(self, function: Callable[[], Any], regions: list[Region | None]) -> fx.GraphModule:
        self._to_place = iter(regions)
        try:
            graph = traced(function)
        finally:
            self._to_place = None
        used = [node for node in graph.graph.nodes if node.target is torch.ops.tide_hf.layer.default and node.users]
        if len(used) < sum(region is not None for region in regions):
            raise RuntimeError("a layer whose result nobody uses")
        return graph

    def _region_of(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any], like: Tensor) -> Region | None:
        arguments = LayerArguments(args, kwargs)
        place = arguments.place
        if place is None:
            return None
        stored = arguments.cache.layers[gate.layer_idx]

        def layer(*tensors: Tensor) -> tuple[Tensor]:
            *rest, slots, start = tensors
            call = arguments.rebuilt(rest)
            with filled_up_to(slots[-1] + 1):
                output = layer_on_fixed_cache(gate, *call, place, stored.keys, stored.values, slots, start)
            return (gate.state_of(output).contiguous(),)

        inputs = _inputs_of(arguments, gate)
        return Region(self.graphs.graph_of(layer, inputs), like)


class CompiledSteps(StepStore):
    """The steps of one model on a CPU, compiled.

    Args:
        compile_graph: As `StepCompiler` takes it.

    Attributes:
        prompts: Reads prompts.
    """

    kind = "compiled steps"
    reads_drafts = True  # it costs nothing
    grows = True  # the few sizes serve all calls; slots that are not filled would take memory, and a mask over them

    def __init__(self, compile_graph: Callable[..., Callable[..., Any]] = compile_graph) -> None:
        self._compile_graph = compile_graph
        super().__init__(partial(StepCompiler, compile_graph), WarmUp("Compiling steps", "steps"))

    def __reduce__(self) -> tuple:
        """Copies and pickles of a model compile for themselves."""
        return CompiledSteps, (self._compile_graph,)

    def release(self) -> None:
        """Give buffers and graphs back."""
        super().release()
        self._kept: dict[tuple[LinearGate, type[WeightLayout]], WeightLayout] = {}
        self.prompts = CompiledPrompts(self._compile_graph, self.warm_up)

    def refresh(self, parts: Callable[[], Parts]) -> None:
        """As `StepStore.refresh`; graphs with layouts of weights that have changed are forgotten as well."""
        if any(gate.kept.get(layout) is not kept for (gate, layout), kept in self._kept.items()):
            self.release()
        super().refresh(parts)

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        parts = buffers.parts
        block = parts.routers.block_head if parts.routers is not None else None
        gates = list(linear_gates(parts.structure, block, parts.draft_unembed.head))
        if not self._kept:  # else it was asked before, and the copies made then have taken memory
            may_copy = all(gate.may_copy for gate in gates)
            self.layers.graphs.has_room = may_copy and copies_fit(gate.module for gate in gates)
        layouts = DRAFT_LAYOUTS if kind == "draft" and self.layers.graphs.has_room else KERNEL_LAYOUTS
        with shared_heads(parts.model, block), allowed_layouts(layouts):
            replay = self.layers.replay_of(function, buffers.state())
        self._kept = {(gate, layout): kept for gate in gates for layout, kept in gate.kept.items()}
        return replay


def _inputs_of(arguments: LayerArguments, gate: LayerGate) -> list[Tensor]:
    """What changes from pass to pass in a layer's call: tensors among its arguments, and where the pass stands."""
    where = arguments.cache.layers[gate.layer_idx].cursor
    return [*arguments.tensors, where.slots, where.start]
