"""Graph passes over linear layers.

Layers that read the same input, such as QKV, are fused into one product: fewer kernel launches and larger reads. Layers
whose weights are plain call their kernel directly, without the Python op that looks up layouts. On a GPU
the products are PyTorch's own, and fused ones read weights that lie next to each other in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from ...kernels.cpu.cpp_kernels import load_op
from ...weights.layouts import WEIGHT_LAYOUTS, PlainWeight, WeightLayout, in_layout

LINEAR = torch.ops.tide_hf.linear.default
aten = torch.ops.aten


class LinearWeights(NamedTuple):
    """The weights of one matrix product, fused or not."""

    indices: list[int]  # of the weights among the graph's constants
    layout: int  # index in `WEIGHT_LAYOUTS`


def fuse_linears(graph: fx.GraphModule, constants: list[Tensor], may_copy: bool) -> list[LinearWeights]:
    """Fuse linear layers that read the same input in the same weight layout, such as QKV; return the fused products.

    The graph is changed in place; `constants` are the values of the graph's last placeholders.
    """
    indices = indices_of_constants(graph, constants)
    found: dict[tuple[Any, bool, int | None], list[Any]] = defaultdict(list)  # layout `None`: integers
    node: Any
    for node in graph.graph.nodes:
        if node.target is LINEAR and indices.keys() >= set(node.args[1]):
            found[node.args[0], node.args[2] is None, _layout_of(node)].append(node)
        elif _is_integer_product(node):
            found[node.args[0], node.args[2] is None, None].append(node)
    products = []
    for (_, _, layout), linears in found.items():
        if len(linears) < 2 or not (layout is None or may_copy or not WEIGHT_LAYOUTS[layout].is_copy):
            continue
        if layout is not None:  # the graph itself names integers
            products.append(LinearWeights([indices[weight] for linear in linears for weight in linear.args[1]], layout))
        _fuse(graph.graph, linears)
    graph.recompile()
    return products


def _is_integer_product(node: fx.Node) -> bool:
    """Whether a node multiplies one weight of integers, for which traces record the kernel itself."""
    return isinstance(node.target, OpOverload) and node.target.name().endswith("::skinny_gemm")


def indices_of_constants(graph: fx.GraphModule, constants: list[Tensor]) -> dict[Any, int]:
    """Map a graph's last placeholders, whose values are `constants`, to their indices in `constants`."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return {node: i for i, node in enumerate(placeholders[len(placeholders) - len(constants) :])}


def _layout_of(linear: fx.Node) -> int:
    layout: Any = linear.args[3] if len(linear.args) > 3 else 0  # graphs leave out default values
    return layout


def _fuse(graph: fx.Graph, linears: list[Any]) -> None:
    first, arguments = linears[0], [list(column) for column in zip(*(linear.args for linear in linears), strict=False)]
    (state, *_), weights, biases = arguments[:3]
    with graph.inserting_before(first):
        bias = None if biases[0] is None else graph.call_function(aten.cat.default, (biases,))
        last = _layout_of(first) if first.target is LINEAR else list(chain(*arguments[3]))  # scales of integers
        whole = graph.call_function(first.target, (state, list(chain(*weights)), bias, last))
        _split(graph, whole, linears)


def call_kernels(graph: fx.GraphModule, constants: list[Tensor]) -> None:
    """Call the GEMM kernel directly where weights are plain; the graph is changed in place."""
    indices = indices_of_constants(graph, constants)
    for node in list(graph.graph.nodes):
        if node.target is not LINEAR:
            continue
        weights: Any = node.args[1]
        state = node.args[0].meta.get("val")
        known = all(weight in indices and constants[indices[weight]].is_contiguous() for weight in weights)
        if not known or state is None or WEIGHT_LAYOUTS[_layout_of(node)] is not PlainWeight:
            continue
        if (product := load_op("skinny_gemm", state.dtype)) is not None:
            node.target, node.args = product, (node.args[0], weights, node.args[2], [])
    graph.recompile()


def _add_input(graph: fx.Graph, name: str) -> fx.Node:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        return graph.placeholder(name)


def layouts_of(products: list[LinearWeights], constants: list[Tensor]) -> list[WeightLayout]:
    """The weights of each matrix product in `products`, converted to its layout."""
    return [in_layout(WEIGHT_LAYOUTS[layout], *(constants[i] for i in indices)) for indices, layout in products]


def join_products(graph: fx.GraphModule, constants: list[Tensor]) -> list[list[int]]:
    """Fuse PyTorch's own products on a GPU that read the same input; return the weights of each, as indices.

    The graph is changed in place: the joined weights of each fused product become an input after all others.
    """
    indices = indices_of_constants(graph, constants)
    found: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        weight = _weight_of(node)
        if weight in indices and _may_join(constants[indices[weight]]):
            state = node.args[-2]
            found[before_views(state), tuple(state.meta["val"].shape), node.target].append(node)
    products = []
    for nodes in found.values():
        of_nodes = [indices[_weight_of(node)] for node in nodes]
        weights = [constants[i] for i in of_nodes]
        if 1 < len(nodes) == len(set(of_nodes)) and (_are_joined(weights) or all(map(_is_alone, weights))):
            products.append(of_nodes)
            _join(graph.graph, nodes, _add_input(graph.graph, f"joined_{len(products)}"))
    graph.recompile()
    return products


def _weight_of(product: fx.Node) -> Any:
    """The node of the weight (out, in) that a node multiplies by; `None` if it is no such product."""
    transposed: Any = product.args[-1] if product.target in (aten.mm.default, aten.addmm.default) else None
    return transposed.args[0] if isinstance(transposed, fx.Node) and transposed.target is aten.t.default else None


def before_views(state: Any) -> Any:
    """The node that `state` is a view of, or `state` itself."""
    while state.target is aten.view.default:
        state = state.args[0]
    return state


def _may_join(weight: Tensor) -> bool:
    """Whether a weight is on a GPU, and could become a view of another tensor."""
    is_plain = type(weight) in (Tensor, nn.Parameter) and weight.is_contiguous() and not weight.is_inference()
    return is_plain and weight.device.type != "cpu"


def _is_alone(weight: Tensor) -> bool:
    """Whether nothing else is in a weight's memory, which would stay when the weight moves."""
    return weight.untyped_storage().nbytes() == weight.nbytes


def _are_joined(weights: Sequence[Tensor]) -> bool:
    """Whether weights lie next to each other in one storage."""
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    is_one = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    return is_one and all(weight.data_ptr() == end for weight, end in zip(weights[1:], ends, strict=False))


def _join(graph: fx.Graph, products: list[Any], joined: fx.Node) -> None:
    first = products[0]
    with graph.inserting_before(first):
        factors = [first.args[-2], graph.call_function(aten.t.default, (joined,))]
        if first.target is aten.addmm.default:
            factors.insert(0, graph.call_function(aten.cat.default, ([node.args[0] for node in products],)))
        _split(graph, graph.call_function(first.target, tuple(factors)), products)


def _split(graph: fx.Graph, whole: fx.Node, linears: list[Any]) -> None:
    """Replace linear layers by slices of one that is fused, at the graph's point of insertion."""
    end = 0
    for linear in linears:
        start, end = end, end + linear.meta["val"].shape[-1]
        part = graph.call_function(aten.slice.Tensor, (whole, -1, start, end))
        linear.replace_all_uses_with(part)
    for linear in linears:
        graph.erase_node(linear)


def joined_weights(products: list[list[int]], constants: list[Tensor]) -> list[Tensor]:
    """The values of the graph inputs that [`join_products`] adds."""
    return [joined([constants[i] for i in indices]) for indices in products]


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Weights (out, in) of one width, one below the other in one tensor. They become views of it, so none is copied."""
    first, width = weights[0], weights[0].shape[1]
    if not _are_joined(weights):
        whole = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
            weight.data = part
    return first.detach().as_strided((sum(map(len, weights)), width), (width, 1))
