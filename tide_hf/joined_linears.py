"""Linear layers of a graph that read the same states, as one product: fewer starts, and larger reads of memory."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, fx


def join_linears(graph: fx.GraphModule, constants: list[Tensor]) -> list[list[int]]:
    """Make one product of layers with packed weights that have one input, such as those before attention.

    Args:
        graph: Of a layer; changed in place.
        constants: What its last placeholders stand for.

    Returns:
        For each product, the places of its weights among the constants.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    places = {node: i for i, node in enumerate(placeholders[len(placeholders) - len(constants) :])}
    found: dict[tuple[fx.Node, bool], list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.target is torch.ops.tide_hf.packed_linear.default and node.args[1] in places:
            found[node.args[0], node.args[2] is None].append(node)
    products = [linears for linears in found.values() if len(linears) > 1]
    joined = []
    for linears in products:
        weights = [places[linear.args[1]] for linear in linears]
        _join(graph.graph, linears, [constants[place].shape[0] for place in weights])
        joined.append(weights)
    graph.recompile()
    return joined


def _join(graph: fx.Graph, linears: list[fx.Node], sizes: list[int]) -> None:
    inputs, weights, biases = ([linear.args[i] for linear in linears] for i in range(3))
    with graph.inserting_before(linears[0]):
        bias = None if biases[0] is None else graph.call_function(torch.ops.aten.cat.default, (biases,))
        whole = graph.call_function(torch.ops.tide_hf.joined_linear.default, (inputs[0], weights, bias))
        end = 0
        for linear, size in zip(linears, sizes, strict=True):
            start, end = end, end + size
            part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, -1, start, end))
            linear.replace_all_uses_with(part)
    for linear in linears:
        graph.erase_node(linear)
