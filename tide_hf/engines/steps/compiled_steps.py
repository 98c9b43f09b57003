"""Steps as Inductor graphs, for CPUs: one graph shared by all decoder layers of a kind, and one around them.

A step of fixed shape is traced below the model's Python, so no code per model family is needed. Each layer is traced by
itself, with its weights and K/V as arguments: layers with equal operations share a compiled graph. In the trace of the
whole step each layer is a single op.
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
from ..gqa_attention import filled_up_to, gqa_attention
from .compiled_prefill import CompiledPrefill
from .fused_linears import call_kernels, layouts_of, quantized_tensors
from .layer_graphs import LayerArguments, LayerGraph, LayerGraphs, layer_on_static_cache
from .progress import WarmUp
from .replay import Replay, restorer
from .step_buffers import Parts, StepBuffers
from .step_graphs import compile_graph, in_parts, lift_constants, traced
from .step_store import StepStore

logger = logging.getLogger(__name__)

_regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
_numbers = itertools.count()


class Region:
    """One decoder layer in one kind of step.

    Args:
        graph: Takes the inputs that change from pass to pass; returns the layer's hidden states in a tuple, as Inductor
            graphs do.
        like: Hidden states of the shape and dtype that it returns.
    """

    def __init__(self, graph: LayerGraph, like: Tensor) -> None:
        self.graph, self.shape, self.dtype = graph, like.shape, like.dtype
        self.number = next(_numbers)
        _regions[self.number] = self


# The op writes K/V without declaring the mutation, which would cost Inductor seconds per step. Layers cannot be
# reordered, since each reads the previous one's output, and `_trace` checks that none is eliminated.
_ops = torch.library.Library("tide_hf", "FRAGMENT")
_ops.define("layer(Tensor[] inputs, int region) -> Tensor")


def _run_region(inputs: list[Tensor], region: int) -> Tensor:
    (state,) = _regions[region].graph(*inputs)
    return state


_ops.impl("layer", _run_region, "CompositeExplicitAutograd")


@torch.library.register_fake("tide_hf::layer", lib=_ops)
def _layer_fake(inputs: list[Tensor], region: int) -> Tensor:
    found = _regions[region]
    return inputs[0].new_empty(found.shape, dtype=found.dtype)


class StepCompiler:
    """Compiles steps, and the layers in them.

    Args:
        compile_graph: Compiles a graph, given its inputs.

    Attributes:
        graphs: The graphs of layers.
    """

    def __init__(self, compile_graph: Callable[..., Callable[..., Any]]) -> None:
        self.compile_graph = compile_graph
        self.graphs = LayerGraphs(compile_graph)
        self._regions: list[Region | None] | None = None  # set while a step is recorded
        self._to_insert: Iterator[Region | None] | None = None  # set while it is traced

    def run(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer in place of `gate.native`."""
        if self._to_insert is not None:
            region = next(self._to_insert)
            if region is None:
                return gate.native(*args, **kwargs)
            state = torch.ops.tide_hf.layer(_inputs_of(LayerArguments(args, kwargs), gate), region.number)
            return gate.with_state(None, state)
        output = gate.native(*args, **kwargs)  # before tracing, so that weights are converted to their layouts
        if self._regions is not None:
            self._regions.append(self._region_of(gate, args, kwargs, gate.state_of(output)))
        return output

    def replay_of(self, function: Callable[[], Any], state: list[Tensor]) -> Replay:
        """Compile a step.

        Args:
            function: The step; reads and writes tensors at fixed addresses.
            state: Tensors that it changes and that are restored after trial runs.
        """
        restore = restorer(state)
        try:
            with compiling(), torch.inference_mode(False), torch.no_grad():
                regions = self._record(function)
                restore()
                graph, lifted = lift_constants(self._trace(function, regions))
                quantized = layouts_of(call_kernels(graph, lifted), lifted)
                constants = [*(tensor.detach() for tensor in lifted), *quantized_tensors(quantized)]
                compiled = in_parts(graph, torch.ops.tide_hf.layer.default, self.compile_graph)
                compiled(*constants)
        # Dynamo and Inductor raise RuntimeError, also without a compiler or for data-dependent shapes; a compiled graph
        # raises AssertionError for inputs that do not match its own.
        except (RuntimeError, AssertionError) as error:
            restore()
            return Replay(function, refused=first_line(error))
        restore()

        def run() -> Any:
            with torch.inference_mode(False), torch.no_grad():
                return compiled(*constants)

        return Replay(run, kept=(regions, quantized))

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
        used = [node for node in graph.graph.nodes if node.target is torch.ops.tide_hf.layer.default and node.users]
        if len(used) < sum(region is not None for region in regions):
            raise RuntimeError("a layer's output is not used")
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
                output = layer_on_static_cache(gate, *call, place, stored.keys, stored.values, slots, start)
            return (gate.state_of(output).contiguous(),)

        inputs = _inputs_of(arguments, gate)
        return Region(self.graphs.graph_of(layer, inputs), like)


class CompiledSteps(StepStore):
    """The steps of one model on a CPU, compiled.

    Args:
        compile_graph: As for `StepCompiler`.

    Attributes:
        prompts: The compiled layers of prefill.
    """

    kind = "compiled steps"
    reads_drafts = True  # free on a CPU
    grows = True  # a few sizes serve all calls; unfilled slots would take memory and mask computation

    def __init__(self, compile_graph: Callable[..., Callable[..., Any]] = compile_graph) -> None:
        self._compile_graph = compile_graph
        super().__init__(partial(StepCompiler, compile_graph), WarmUp("Compiling steps", "steps"))

    def __reduce__(self) -> tuple:
        """Leave compiled steps out of copies and pickles."""
        return CompiledSteps, (self._compile_graph,)

    def release(self) -> None:
        """Free buffers and graphs."""
        super().release()
        self._kept: dict[tuple[LinearGate, type[WeightLayout]], WeightLayout] = {}
        self.prompts = CompiledPrefill(self._compile_graph, self.warm_up)

    def refresh(self, parts: Callable[[], Parts]) -> None:
        """As `StepStore.refresh`; also drops graphs whose converted weights have changed."""
        if any(gate.converted.get(layout) is not kept for (gate, layout), kept in self._kept.items()):
            self.release()
        super().refresh(parts)

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        parts = buffers.parts
        block = parts.routers.block_head if parts.routers is not None else None
        gates = list(linear_gates(parts.structure, block, parts.draft_unembed.head))
        if not self._kept:  # checked once, since the copies made then have taken memory
            may_copy = all(gate.may_copy for gate in gates)
            self.layers.graphs.has_room = may_copy and copies_fit(gate.module for gate in gates)
        layouts = DRAFT_LAYOUTS if kind == "draft" and self.layers.graphs.has_room else KERNEL_LAYOUTS
        with gqa_attention(parts.model, block), allowed_layouts(layouts):
            replay = self.layers.replay_of(function, buffers.state())
        self._kept = {(gate, layout): kept for gate in gates for layout, kept in gate.converted.items()}
        return replay


def _inputs_of(arguments: LayerArguments, gate: LayerGate) -> list[Tensor]:
    """The inputs of a layer that change from pass to pass: its tensor arguments, and the cursor."""
    where = arguments.cache.layers[gate.layer_idx].cursor
    return [*arguments.tensors, where.slots, where.start]
