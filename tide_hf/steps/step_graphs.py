"""Graphs of steps and of the layers in them: traced, and compiled by Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._inductor import compile as inductor_compile
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.split_module import split_module

VALUES_PER_THREAD = 16384  # for fewer, waiting for another thread takes longer than what it would do


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The operations of a function; whatever it asks of values is an error."""
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, torch_logger.disabled = torch_logger.disabled, True  # or it prints a traceback of what is caught here
    try:
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    finally:
        torch_logger.disabled = before


def lift_constants(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """Make a graph's constants its last inputs, where Inductor need not look into them; return them as well."""
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
    """Compile a graph by Inductor, for inputs of these shapes alone."""
    mode = FakeTensorMode(shape_env=ShapeEnv())  # without one it would not look into its cache on disk
    fixed: list[Any] = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
    with tracing(TracingContext(mode)):
        return inductor_compile(graph, fixed, options={"cpp.min_chunk_size": VALUES_PER_THREAD})


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
    """Have what comes before the first `layer` compiled by itself.

    It makes what all layers read, such as masks. In one graph Inductor makes that anew for each of them.
    """
    before = set(takewhile(lambda node: node.target is not layer, graph.graph.nodes))
    parts: Any = split_module(graph, graph, lambda node: int(node not in before))
    for name, part in list(parts.named_children()):
        setattr(parts, name, _Part(part, compile_graph))
    return parts
