"""Graphs of steps and of decoder layers: traced at the level of PyTorch's operators, and compiled with Inductor.

Each decoder layer is traced by itself, with its weights and K/V as arguments, so that layers with equal operations
share a compiled graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._inductor import compile as inductor_compile
from torch._inductor import config as inductor_config
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.split_module import split_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...kernels.compile_cache import compiling
from ...kernels.cpu.cpp_kernels import spare_probes
from .dequantised_products import reduce_products
from .fused_linears import (
    LinearWeights,
    call_kernels,
    fuse_linears,
    join_products,
    joined_weights,
    layouts_of,
)

VALUES_PER_THREAD = 16384  # with fewer, another thread costs more than it saves

# On a GPU, kernels that do not depend on each other, such as RoPE of queries, and of keys with both K/V writes, are
# launched as one. Older versions of Inductor would join sums as well.
ONE_LAUNCH = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
ONE_LAUNCH = ONE_LAUNCH if hasattr(inductor_config, "combo_kernels_pointwise_only") else {}

CompileGraph = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]  # called with a graph and its inputs


# Before PyTorch 2.15, tracing refuses products of experts in other dtypes than bfloat16, which run all the same.
_ops = torch.library.Library("tide_hf", "FRAGMENT")
_ops.define("grouped_mm(Tensor input, Tensor weights, Tensor ends) -> Tensor")
_ops.impl("grouped_mm", torch._grouped_mm, "CompositeExplicitAutograd")


@torch.library.register_fake("tide_hf::grouped_mm", lib=_ops)
def _fake_grouped_mm(input: Tensor, weights: Tensor, _ends: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weights.shape[2])


def _grouped_mm(input: Tensor, weights: Tensor, ends: Tensor | None = None, *_others: Any, **_options: Any) -> Any:
    """Record a product of tokens (tokens, in), sorted by expert, and experts (experts, in, out) as one op."""
    is_known = input.dtype is weights.dtype is not torch.bfloat16 and (input.dim(), weights.dim()) == (2, 3)
    return torch.ops.tide_hf.grouped_mm(input, weights, ends) if is_known else NotImplemented


RECORDED_WHOLE = {torch.ops.aten._grouped_mm.default: _grouped_mm}


def traced(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> fx.GraphModule:
    """Trace a function for static shapes, or if `dynamic` for symbolic sizes; data-dependent operations raise."""
    fake_logger = logging.getLogger("torch._subclasses.fake_tensor")
    # Otherwise this logger prints tracebacks of errors that callers handle.
    before, fake_logger.disabled = fake_logger.disabled, True
    shapes: Any = torch.fx.experimental._config
    mode: Any = "symbolic" if dynamic else "fake"
    try:
        with shapes.patch(use_duck_shape=False):  # otherwise sizes that are equal now would be assumed always equal
            return make_fx(function, RECORDED_WHOLE, mode, _allow_non_fake_inputs=True)(*inputs)
    finally:
        fake_logger.disabled = before


class Sizes:
    """The guards on input sizes that tracing and compiling a graph with symbolic sizes have collected."""

    def __init__(self, graph: fx.GraphModule) -> None:
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        inputs = [node.meta["val"] for node in placeholders if "val" in node.meta]  # constants have no `val`
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
    """Turn constants into a graph's last inputs, on which Inductor does not specialise; return graph and constants."""
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
    """Compile a graph with Inductor: for symbolic sizes if it was traced with them, else for the shapes of `inputs`."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    sized = {node: node.meta["val"] for node in placeholders if _changes_size(node.meta.get("val"))}
    # Inductor uses its cache on disk only with a shape environment.
    mode = next((value.fake_mode for value in sized.values()), None) or FakeTensorMode(shape_env=ShapeEnv())
    fakes: list[Any] = [
        sized[node] if node in sized else mode.from_tensor(tensor, static_shapes=True)
        for node, tensor in zip(placeholders, inputs, strict=True)
    ]
    # Steps pass the same buffers every time, and checking them took a fifth of a millisecond in a pass of 30 layers.
    options = {"cpp.min_chunk_size": VALUES_PER_THREAD, "size_asserts": bool(sized)}
    if any(tensor.device.type != "cpu" for tensor in inputs):
        options |= ONE_LAUNCH
    options |= graph.meta.get("inductor_options", {})
    with compiling(), tracing(TracingContext(mode)):
        spare_probes()
        return inductor_compile(graph, fakes, options=options)


def _changes_size(value: Any) -> bool:
    return isinstance(value, Tensor) and any(isinstance(size, SymInt) for size in value.shape)


class _Part(nn.Module):
    """A part of a graph, compiled when it first runs."""

    def __init__(self, graph: Any, compile_graph: CompileGraph) -> None:
        super().__init__()
        self._graph, self._compile = graph, compile_graph
        self._compiled: Callable[..., Any] | None = None

    def forward(self, *inputs: Tensor) -> Any:
        if self._compiled is None:
            self._compiled, self._graph = self._compile(self._graph, list(inputs)), None
        return self._compiled(*inputs)


def in_parts(graph: fx.GraphModule, layer: OpOverload, compile_graph: CompileGraph) -> Callable[..., Any]:
    """Split a graph before the first `layer` op into two parts, each of which is compiled when it first runs.

    The first part computes what all layers read, such as masks; in one graph, Inductor would recompute it per layer.
    """
    before = set(takewhile(lambda node: node.target is not layer, graph.graph.nodes))
    parts: Any = split_module(graph, graph, lambda node: int(node not in before))
    for name, part in list(parts.named_children()):
        setattr(parts, name, _Part(part, compile_graph))
    return parts


class OperationLog(TorchDispatchMode):
    """Records operations with their arguments, in which each tensor is named as an input, a constant or a result.

    Functions with equal logs compute the same from their inputs and constants. A constant is a tensor that is neither
    an input nor a result; constants are numbered in the order of their first use.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.constants: list[Tensor] = []
        self._entries: list[tuple[Any, str]] = []
        self._seen = list(inputs)  # kept alive, so that ids stay unique
        self._names = {id(tensor): f"input {number} {_describe(tensor)}" for number, tensor in enumerate(inputs)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operation and run it."""
        kwargs = kwargs or {}
        self._entries.append((func, str(tree_map_only(Tensor, self._name, (args, kwargs)))))
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in self._names:
                self._names[id(tensor)] = f"result {len(self._names)}"
                self._seen.append(tensor)
        return result

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Count as one of PyTorch's own tracing modes, not as a user's mode."""
        return True

    @property
    def key(self) -> tuple[tuple[Any, str], ...]:
        """The recorded operations; functions with equal keys compute the same."""
        return tuple(self._entries)

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"constant {len(self.constants)} {_describe(tensor)}"
            self.constants.append(tensor)
            self._seen.append(tensor)
        return self._names[id(tensor)]


def _describe(tensor: Tensor) -> str:
    laid_out = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return f"{tuple(tensor.shape)} {laid_out} {tensor.dtype}"


class _Compiled(NamedTuple):
    """A compiled graph of a layer, which takes inputs, constants and joined weights."""

    function: Callable[..., Any]  # returns a tuple
    sizes: Sizes | None  # input sizes that the graph serves; `None` for static shapes
    fused: list[LinearWeights]  # fused products, whose weights are among the constants
    joined: list[list[int]]  # the weights of each product that is fused on a GPU, by index among the constants


class LayerGraph:
    """A compiled graph bound to one layer's constants: weights, K/V and other tensors at fixed addresses."""

    def __init__(self, compiled: _Compiled, constants: list[Tensor]) -> None:
        self._function, self.sizes = compiled.function, compiled.sizes
        self._layouts = layouts_of(compiled.fused, constants)  # kept alive
        joined = joined_weights(compiled.joined, constants)  # moves weights, so before they are detached
        self._constants = [*(tensor.detach() for tensor in constants), *joined]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the layer."""
        found: tuple[Tensor, ...] = self._function(*inputs, *self._constants)
        return found


class LayerGraphs:
    """Compiles the graphs of layers."""

    def __init__(self, compile_graph: CompileGraph) -> None:
        self._compile = compile_graph
        self._compiled: dict[tuple, _Compiled] = {}
        # By operations: the compiled graph, and the index of each of its constants among those of the log.
        self._by_operations: dict[tuple, tuple[_Compiled, list[int]]] = {}

    @property
    def num_compiled(self) -> int:
        """Number of graphs compiled so far."""
        return len(self._compiled)

    def graph_of(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: list[Tensor],
        dynamic: bool = False,
        may_copy: bool = False,
    ) -> tuple[LayerGraph, tuple[Tensor, ...]]:
        """Compile the graph of a layer, or reuse the graph of a layer with equal operations; and what `function` gave.

        `function` runs the layer on `inputs`, which change from pass to pass; with `dynamic`, their sizes change too.
        With `may_copy`, weights may be copied to be read by one product.
        All other tensors that the layer reads or writes have fixed addresses.
        """
        with OperationLog(inputs) as log:  # takes a tenth of a trace's time, and most layers have equal logs
            results = function(*inputs)
        operations = (dynamic, log.key)
        if operations in self._by_operations:
            compiled, order = self._by_operations[operations]
            return LayerGraph(compiled, [log.constants[i] for i in order]), results
        graph, constants = lift_constants(traced(function, *inputs, dynamic=dynamic))
        fused = fuse_linears(graph, constants, may_copy)
        if inputs[0].device.type != "cpu" and not dynamic:
            reduce_products(graph, constants)
        call_kernels(graph, constants)
        joined = join_products(graph, constants)
        taken = [*inputs, *constants, *joined_weights(joined, constants)]
        kind = (dynamic, graph.code, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in taken))
        if kind not in self._compiled:
            compiled_function = self._compile(graph, taken)  # compiling may add guards on sizes
            sizes = Sizes(graph) if dynamic else None
            self._compiled[kind] = _Compiled(compiled_function, sizes, fused, joined)
        compiled = self._compiled[kind]
        known = {id(tensor): i for i, tensor in enumerate(log.constants)}
        if all(id(tensor) in known for tensor in constants):
            self._by_operations[operations] = compiled, [known[id(tensor)] for tensor in constants]
        return LayerGraph(compiled, constants), results
