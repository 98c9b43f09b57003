"""Linear layers of a graph, with less between them.

Those that read the same states become one product: fewer starts, and larger reads of memory. Those that read weights as
they are stored, or rounded, call the kernel itself, without the Python of the op that finds weights in other forms.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...kernels.cpu.products import MOST_ROUNDED_ROWS, rounded_product_of, stored_product_of
from ...kernels.cpu.weight_forms import FORMS, RoundedWeight, StoredWeight, WeightForm, in_form

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


def call_kernels(graph: fx.GraphModule, constants: list[Tensor]) -> list[Product]:
    """Have linear layers call a kernel where their weights are in a form that one reads.

    Args:
        graph: Changed in place.
        constants: What its last placeholders stand for.

    Returns:
        The products by rounded weights. What those hold, `packed` and `scales` of each in this order, are further
        inputs of the graph, its last.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    places = {node: i for i, node in enumerate(placeholders[len(placeholders) - len(constants) :])}
    rounded: list[Product] = []
    for node in list(graph.graph.nodes):
        if node.target not in (ONE, JOINED):
            continue
        weights: Any = node.args[1] if node.target is JOINED else [node.args[1]]
        state, form = node.args[0].meta.get("val"), _form_of(node)
        known = all(weight in places and constants[places[weight]].is_contiguous() for weight in weights)
        if not known or state is None:
            continue
        if FORMS[form] is StoredWeight and (product := stored_product_of(state.dtype)) is not None:
            node.target, node.args = product, (node.args[0], weights, node.args[2])
        is_rounded = FORMS[form] is RoundedWeight and state.numel() <= MOST_ROUNDED_ROWS * state.shape[-1]
        if is_rounded and (product := rounded_product_of(state.dtype)) is not None:
            held = [_add_input(graph.graph, f"rounded_{len(rounded)}_{name}") for name in ("packed", "scales")]
            node.target, node.args = product, (node.args[0], *held, node.args[2])
            rounded.append(Product([places[weight] for weight in weights], form))
    graph.recompile()
    return rounded


def _add_input(graph: fx.Graph, name: str) -> fx.Node:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        return graph.placeholder(name)


def forms_of(products: list[Product], constants: list[Tensor]) -> list[WeightForm]:
    """The weights of products, in the forms in which they are read."""
    return [in_form(FORMS[form], *(constants[place] for place in places)) for places, form in products]


def held_by(rounded: list[WeightForm]) -> list[Tensor]:
    """The further inputs of a graph with products by rounded weights, see [`call_kernels`]."""
    return [tensor for form in rounded if isinstance(form, RoundedWeight) for tensor in (form.packed, form.scales)]
