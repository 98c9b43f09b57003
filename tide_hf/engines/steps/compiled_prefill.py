"""The layers of prefill as Inductor graphs with dynamic shapes.

Prefill spends a fifth to a third of its time between matrix products, in forty small operations per layer, each of
which reads and writes all tokens. The native forward of a layer is traced with symbolic sizes and compiled once for all
layers of a kind. Guards on sizes, such as the choice of the fastest weight layout, bound the sizes that a graph serves;
others get a graph of their own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...common.errors import first_line
from ...depth.gates import LayerGate
from ...kernels.compile_cache import compiling
from .layer_graphs import LayerArguments, LayerGraph, LayerGraphs
from .progress import WarmUp
from .step_graphs import Sizes, traced_for_sizes

MAX_GRAPHS = 8  # per layer, by sizes; further sizes run natively

logger = logging.getLogger(__name__)


class CompiledPrefill:
    """Runs the layers of prefill compiled where possible, else natively.

    Args:
        compile_graph: As for `StepCompiler`.
        warm_up: Counts what compiling takes.

    Attributes:
        num_compiled: Layers that ran compiled so far.
        refused: Why kinds of layer cannot be compiled, by class.
    """

    def __init__(self, compile_graph: Callable[..., Callable[..., Any]], warm_up: WarmUp) -> None:
        self.num_compiled = 0
        self.refused: dict[type, str] = {}
        self._warm_up = warm_up
        self._layers = LayerGraphs(partial(_ForSizes, compile_graph), traced_for_sizes)
        self._graphs: defaultdict[tuple, list[tuple[Sizes, LayerGraph]]] = defaultdict(list)

    def run(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer in place of `gate.native`."""
        arguments = LayerArguments(args, kwargs)
        others = [leaf for leaf in arguments.leaves if not isinstance(leaf, Tensor)]
        is_plain = all(leaf is None or isinstance(leaf, (bool, int, float, str)) for leaf in others)
        is_own = is_plain and gate.replaced is None and type(gate.module) not in self.refused
        if is_in_torch_dispatch_mode() or not is_own or not _is_first(arguments, gate):  # a dispatch mode is active
            return gate.native(*args, **kwargs)
        inputs = [tensor.contiguous() for tensor in arguments.tensors]
        kinds = tuple((tensor.ndim, tensor.dtype) for tensor in inputs)
        key = (gate.layer_idx, arguments.place, arguments.tree_spec, *others, *kinds)
        known = self._graphs[key]
        graph = next((graph for sizes, graph in known if sizes.hold(inputs)), None)
        if graph is not None:
            with torch.inference_mode(False), torch.no_grad():
                state, *stored = graph(*inputs)
            if stored:
                arguments.cache.update(*stored, gate.layer_idx)
            self.num_compiled += 1
            return gate.with_state(None, state)
        output = gate.native(*args, **kwargs)  # before tracing, so that weights are converted to their layouts
        if len(known) < MAX_GRAPHS:
            self._add_to(known, gate, arguments, inputs)
        return output

    def _add_to(
        self,
        known: list[tuple[Sizes, LayerGraph]],
        gate: LayerGate,
        arguments: LayerArguments,
        inputs: list[Tensor],
    ) -> None:
        def layer(*tensors: Tensor) -> tuple[Tensor, ...]:
            cache = _TracedEmptyCache()
            args, kwargs = arguments.rebuilt(tensors, cache)
            state = gate.state_of(gate.native(*args, **kwargs))
            return state.contiguous(), *cache.stored

        start, num_before = perf_counter(), self._layers.num_compiled
        try:
            with compiling(), torch.inference_mode(False), torch.no_grad():
                graph: Any = self._layers.graph_of(layer, inputs)
                graph(*inputs)
            known.append((graph.function.sizes, graph))
        except (RuntimeError, AssertionError) as error:  # as for steps
            self.refused[type(gate.module)] = reason = first_line(error)
            logger.info("%s runs prefill uncompiled: %s", type(gate.module).__name__, reason)
        num_new, seconds = self._layers.num_compiled - num_before, perf_counter() - start
        self._warm_up.add(num_new, seconds)
        if num_new:
            logger.info("layers of prefill compiled: %.2f s", seconds)


class _ForSizes:
    """A compiled graph, and the sizes that it serves."""

    def __init__(
        self, compile_graph: Callable[..., Callable[..., Any]], graph: fx.GraphModule, inputs: list[Tensor]
    ) -> None:
        self._compiled = compile_graph(graph, inputs)
        self.sizes = Sizes(graph)

    def __call__(self, *inputs: Tensor) -> Any:
        return self._compiled(*inputs)


class _TracedEmptyCache:
    """Stands for an empty cache while a layer is traced."""

    def __init__(self) -> None:
        self.stored: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `DynamicLayer.update`."""
        self.stored = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, *_args: Any) -> int:
        """Zero tokens."""
        return 0


def _is_first(arguments: LayerArguments, gate: LayerGate) -> bool:
    """Whether a layer is about to write the first tokens of a dynamic cache."""
    if arguments.place is None or len(arguments.cache.layers) <= gate.layer_idx:
        return False
    layer = arguments.cache.layers[gate.layer_idx]
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.get_seq_length() == 0
