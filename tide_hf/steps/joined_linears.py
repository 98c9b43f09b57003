"""Linear layers of a graph, with less between them.

Those that read the same states become one product: fewer starts, and larger reads of memory. Those that read weights as
they are stored call the kernel itself, without the Python of the op that finds weights in other forms.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..cpu.few_rows import MOST_ROWS, product_of
from ..cpu.weight_forms import FORMS, StoredWeight

ONE, JOINED = torch.ops.tide_hf.linear.default, torch.ops.tide_hf.joined_linear.default


class Product(NamedTuple):
    """Of several layers' weights.

    Attributes:
        places: Of the weights, among the constants.
        form: In which they are read, by its place among `FORMS`.
    """

    places: list[int]
    form: int


def join_linears(graph: fx.GraphModule, constants: list[Tensor], may_copy: bool) -> list[Product]:
    """Make one product of layers that read one input, and their weights in one form, such as those before attention.

    Args:
        graph: Of a layer; changed in place.
        constants: What its last placeholders stand for.
        may_copy: Whether there may be copies of the weights.

    Returns:
        The products.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    places = {node: i for i, node in enumerate(placeholders[len(placeholders) - len(constants) :])}
    found: dict[tuple[fx.Node, bool, int], list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.target is ONE and node.args[1] in places:
            found[node.args[0], node.args[2] is None, _form_of(node)].append(node)
    products = []
    for (_, _, form), linears in found.items():
        if len(linears) > 1 and (may_copy or not FORMS[form].is_copy):
            products.append(Product([places[linear.args[1]] for linear in linears], form))
            _join(graph.graph, linears, [constants[place].shape[0] for place in products[-1].places])
    graph.recompile()
    return products


def _form_of(linear: fx.Node) -> int:
    form: Any = linear.args[3] if len(linear.args) > 3 else 0  # a graph leaves out what is as declared
    return form


def _join(graph: fx.Graph, linears: list[fx.Node], sizes: list[int]) -> None:
    inputs, weights, biases = ([linear.args[i] for linear in linears] for i in range(3))
    with graph.inserting_before(linears[0]):
        bias = None if biases[0] is None else graph.call_function(torch.ops.aten.cat.default, (biases,))
        whole = graph.call_function(JOINED, (inputs[0], weights, bias, _form_of(linears[0])))
        end = 0
        for linear, size in zip(linears, sizes, strict=True):
            start, end = end, end + size
            part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, -1, start, end))
            linear.replace_all_uses_with(part)
    for linear in linears:
        graph.erase_node(linear)


def call_kernels(graph: fx.GraphModule, inputs: list[Tensor]) -> None:
    """Have linear layers call the kernel for a few rows where their weights are in the form that it reads.

    Args:
        graph: Of a layer; changed in place.
        inputs: What its placeholders stand for.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, inputs, strict=True))
    for node in list(graph.graph.nodes):
        if node.target not in (ONE, JOINED) or FORMS[_form_of(node)] is not StoredWeight:
            continue
        weights: Any = node.args[1] if node.target is JOINED else [node.args[1]]
        state = node.args[0].meta.get("val")
        if not all(weight in given and given[weight].is_contiguous() for weight in weights) or state is None:
            continue
        product = product_of(state.dtype)
        if product is not None and state.numel() <= MOST_ROWS * state.shape[-1]:
            node.target, node.args = product, (node.args[0], weights, node.args[2])
    graph.recompile()
