"""Graphs of steps and of the layers in them: traced, and compiled by Inductor."""

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

VALUES_PER_THREAD = 16384  # for fewer, waiting for another thread takes longer than what it would do


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The operations of a function; whatever it asks of values is an error."""
    return _traced(function, inputs, "fake")


def traced_for_sizes(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """As [`traced`], for other sizes of the inputs as well; see [`Sizes`]."""
    shapes: Any = torch.fx.experimental._config
    with shapes.patch(use_duck_shape=False):  # or sizes that are the same by chance would have to stay so
        return _traced(function, inputs, "symbolic")


def _traced(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], mode: Literal["fake", "symbolic"]
) -> fx.GraphModule:
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, torch_logger.disabled = torch_logger.disabled, True  # or it prints a traceback of what is caught here
    try:
        return make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    finally:
        torch_logger.disabled = before


class Sizes:
    """For which sizes of its inputs a graph holds, by what its trace, and then its compiler, asked of them.

    Args:
        graph: From [`traced_for_sizes`], compiled.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        inputs = [node.meta["val"] for node in placeholders if "val" in node.meta]  # constants have none
        self._env = inputs[0].fake_mode.shape_env
        sizes = [size for tensor in inputs for size in tensor.shape]
        self._asked = self._env.produce_guards_expression(placeholders=sizes) or "True"
        self._known: dict[tuple[int, ...], bool] = {}

    def hold(self, inputs: list[Tensor]) -> bool:
        """Whether the graph can take these inputs."""
        sizes = tuple(size for tensor in inputs for size in tensor.shape)
        if sizes not in self._known:
            self._known[sizes] = bool(self._env.evaluate_guards_expression(self._asked, list(sizes)))
        return self._known[sizes]


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
    """Compile a graph by Inductor, for inputs of these shapes alone, or of the sizes for which it was traced."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    sized = {node: node.meta["val"] for node in placeholders if _changes_size(node.meta.get("val"))}
    # Without an environment Inductor would not look into its cache on disk.
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
    """Have what comes before the first `layer` compiled by itself.

    It makes what all layers read, such as masks. In one graph Inductor makes that anew for each of them.
    """
    before = set(takewhile(lambda node: node.target is not layer, graph.graph.nodes))
    parts: Any = split_module(graph, graph, lambda node: int(node not in before))
    for name, part in list(parts.named_children()):
        setattr(parts, name, _Part(part, compile_graph))
    return parts
