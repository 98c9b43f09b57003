"""Trace graphs of steps and layers, and compile them with Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import SymInt, Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._inductor import compile as inductor_compile
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.split_module import split_module

from ...kernels.compile_cache import compiling

VALUES_PER_THREAD = 16384  # for fewer, synchronising another thread costs more than it saves


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Trace a function with static shapes; data-dependent operations raise."""
    return _traced(function, inputs, "fake")


def traced_for_sizes(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Trace a function with symbolic sizes; see [`Sizes`]."""
    shapes: Any = torch.fx.experimental._config
    with shapes.patch(use_duck_shape=False):  # or equal sizes would be assumed equal
        return _traced(function, inputs, "symbolic")


def _traced(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], mode: Literal["fake", "symbolic"]
) -> fx.GraphModule:
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    # Else it logs a traceback of errors that are handled here.
    before, torch_logger.disabled = torch_logger.disabled, True
    try:
        return make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    finally:
        torch_logger.disabled = before


class Sizes:
    """The guards on input sizes that tracing and compiling a graph have collected.

    Args:
        graph: From [`traced_for_sizes`], compiled.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        inputs = [node.meta["val"] for node in placeholders if "val" in node.meta]  # constants have none
        self._env = inputs[0].fake_mode.shape_env
        sizes = [size for tensor in inputs for size in tensor.shape]
        self._guards = self._env.produce_guards_expression(placeholders=sizes) or "True"
        self._known: dict[tuple[int, ...], bool] = {}

    def hold(self, inputs: list[Tensor]) -> bool:
        """Whether the inputs satisfy the guards."""
        sizes = tuple(size for tensor in inputs for size in tensor.shape)
        if sizes not in self._known:
            self._known[sizes] = bool(self._env.evaluate_guards_expression(self._guards, list(sizes)))
        return self._known[sizes]


def lift_constants(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """Turn a graph's constants into its last inputs, so that Inductor does not specialise on them; return both."""
    constants: dict[str, Tensor] = {}
    nodes: dict[str, fx.Node] = {}
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in nodes:
            constants[node.target] = getattr(graph, node.target)
            with graph.graph.inserting_before(first):
                nodes[node.target] = graph.graph.placeholder(f"constant_{len(nodes)}")
        node.replace_all_uses_with(nodes[node.target])
        if node is first:
            first = node.next
        graph.graph.erase_node(node)
    return fx.GraphModule({}, graph.graph), list(constants.values())


def compile_graph(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph with Inductor, for the shapes of these inputs or, if traced so, for symbolic sizes."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    sized = {node: node.meta["val"] for node in placeholders if _changes_size(node.meta.get("val"))}
    # Inductor uses its cache on disk only with a shape environment.
    mode = next((value.fake_mode for value in sized.values()), None) or FakeTensorMode(shape_env=ShapeEnv())
    fakes: list[Any] = [
        sized[node] if node in sized else mode.from_tensor(tensor, static_shapes=True)
        for node, tensor in zip(placeholders, inputs, strict=True)
    ]
    with compiling(), tracing(TracingContext(mode)):
        return inductor_compile(graph, fakes, options={"cpp.min_chunk_size": VALUES_PER_THREAD})


def _changes_size(value: Any) -> bool:
    return isinstance(value, Tensor) and any(isinstance(size, SymInt) for size in value.shape)


class _Part(nn.Module):
    """A part of a graph, compiled when it first runs."""

    def __init__(self, graph: Any, compile_graph: Callable[..., Callable[..., Any]]) -> None:
        super().__init__()
        self._graph, self._compile = graph, compile_graph
        self._compiled: Callable[..., Any] | None = None

    def forward(self, *inputs: Tensor) -> Any:
        if self._compiled is None:
            self._compiled, self._graph = self._compile(self._graph, list(inputs)), None
        return self._compiled(*inputs)


def in_parts(
    graph: fx.GraphModule, layer: OpOverload, compile_graph: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    """Compile the operations before the first `layer` as a graph of their own.

    They compute what all layers read, such as masks. In a single graph Inductor would recompute that for each layer.
    """
    before = set(takewhile(lambda node: node.target is not layer, graph.graph.nodes))
    parts: Any = split_module(graph, graph, lambda node: int(node not in before))
    for name, part in list(parts.named_children()):
        setattr(parts, name, _Part(part, compile_graph))
    return parts
