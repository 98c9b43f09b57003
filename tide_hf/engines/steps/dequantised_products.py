"""A graph pass for steps on a GPU: products of few rows with weights that the step dequantises.

Packages for quantisation dequantise a whole weight before its product, which a compiler cannot fuse into a library's
GEMM: the step would write and read all weights in floating point. As reductions over the weight's rows, one for each
row of the input, Inductor compiles the product to one kernel that reads the weight once, as it is stored. The pass
knows no package and no format: it looks for second factors that are computed from a graph's constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from .fused_linears import before_views, indices_of_constants
from .step_tensors import WIDEST

# Of the input. Each row takes an accumulator, so registers bound their number; more rows take PyTorch's own product.
MAX_ROWS = WIDEST
# Inductor would otherwise split reductions over groups in two, whose second halves are a kernel for each input row.
INDUCTOR_OPTIONS = {"split_reductions": False}

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def reduce_products(graph: fx.GraphModule, constants: list[Tensor]) -> int:
    """Replace products of few rows with weights that the graph dequantises by reductions; return how many.

    The graph is changed in place, and says in `meta` how to compile it; `constants` are the values of its last
    placeholders.
    """
    dequantised, found = _computed_from(graph, set(indices_of_constants(graph, constants))), 0
    written = {_base_of(node.args[0]) for node in graph.graph.nodes if _is_write(node)}
    rows: dict[tuple[Any, int], list[fx.Node]] = {}  # products with one input share its rows
    for node in list(graph.graph.nodes):
        if node.target not in PRODUCTS or node.kwargs or node.args[-1] not in dequantised:
            continue
        state, weight = (arg.meta["val"] for arg in node.args[-2:])
        count = state.shape[:-1].numel()
        if count > MAX_ROWS or (state.dim() > 2 and len(weight) > 1 and weight.stride(0) != 0):
            continue
        key = before_views(node.args[-2]), state.shape[-1]
        with graph.graph.inserting_before(node):
            if key not in rows or _base_of(key[0]) in written:
                rows[key] = _rows_of(graph.graph, node.args[-2])
            node.replace_all_uses_with(_reductions(graph.graph, node, rows[key]))
        graph.graph.erase_node(node)
        found += 1
    if found:
        graph.meta["inductor_options"] = INDUCTOR_OPTIONS
        graph.recompile()
    return found


def _computed_from(graph: fx.GraphModule, constants: set[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from constants alone, other than views of them."""
    found: dict[fx.Node, bool] = dict.fromkeys(constants, False)  # whether more than a view
    for node in graph.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and all(other in found for other in inputs):
            found[node] = not _is_view(node) or any(found[other] for other in inputs)
    return {node for node, is_computed in found.items() if is_computed}


def _is_view(node: fx.Node) -> bool:
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


def _is_write(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _base_of(node: Any) -> Any:
    """The node whose memory a node shows."""
    while isinstance(node, fx.Node) and (_is_view(node) or _is_write(node)):
        node = node.args[0]
    return node


def _rows_of(graph: fx.Graph, state: Any) -> list[fx.Node]:
    """The rows (in,) of an input (..., in), in the dtype in which products are summed."""
    shape, dtype = state.meta["val"].shape, state.meta["val"].dtype
    # Only strides make Inductor keep the input in memory. It would compute an activation anew for each of its weights.
    whole = graph.call_function(aten.clone.default, (state,), {"memory_format": torch.contiguous_format})
    starts = range(0, shape.numel(), shape[-1])
    rows = [graph.call_function(aten.as_strided.default, (whole, [shape[-1]], [1], start)) for start in starts]
    return [_converted(graph, row, dtype, _summed(dtype)) for row in rows]


def _reductions(graph: fx.Graph, product: Any, rows: list[fx.Node]) -> fx.Node:
    """The product (..., out), of which each row is a reduction over all weights."""
    *bias, _, weight = product.args
    like = product.meta["val"]
    if like.dim() > 2:  # the weight is expanded over a batch
        weight = graph.call_function(aten.select.int, (weight, 0, 0))
    weight = _converted(graph, graph.call_function(aten.t.default, (weight,)), like.dtype, _summed(like.dtype))
    terms = [graph.call_function(aten.mul.Tensor, (row, weight)) for row in rows]
    sums = [graph.call_function(aten.sum.dim_IntList, (term, [-1])) for term in terms]
    found = graph.call_function(aten.view.default, (graph.call_function(aten.stack.default, (sums,)), list(like.shape)))
    if bias:
        found = graph.call_function(aten.add.Tensor, (found, bias[0]))
    found = _converted(graph, found, _summed(like.dtype), like.dtype)
    found.meta["val"] = like
    return found


def _summed(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def _converted(graph: fx.Graph, node: fx.Node, before: torch.dtype, dtype: torch.dtype) -> fx.Node:
    return node if dtype == before else graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
