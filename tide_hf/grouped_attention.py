"""Attention over shared K/V heads without copies of them, in a traced layer.

Where there is a mask, transformers repeats K/V for every query head that shares them, which in a step over K/V of a
fixed size means copying all of it each time. Query heads that share K/V may as well stand behind each other as further
queries of one head, under the same mask.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
VIEWS = (aten._unsafe_view.default, aten.view.default)


def share_heads(graph: fx.Graph) -> int:
    """Rewrite the attention in a traced graph where it can be; return how often.

    Args:
        graph: Traced by `make_fx`, whose nodes know their shapes.
    """
    found = 0
    for node in list(graph.nodes):
        shared = _shared_kv(node) if node.target is ATTENTION else None
        if shared is not None:
            _rewrite(graph, node, *shared)
            found += 1
    if found:
        graph.eliminate_dead_code()
    return found


def _shared_kv(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """K and V as they are stored, where an attention repeats them and nothing else is in the way."""
    keys, values = (_before_repeating(one) for one in node.args[1:3])
    mask: Any = node.kwargs.get("attn_mask")
    if keys is None or values is None or len(node.args) > 3 or _shape(keys) != _shape(values) or mask is None:
        return None
    uses_output_alone = all(user.target is operator.getitem and user.args[1] == 0 for user in _used(node))
    return (keys, values) if len(_shape(mask)) == 4 and _shape(mask)[1] == 1 and uses_output_alone else None


def _rewrite(graph: fx.Graph, node: fx.Node, keys: fx.Node, values: fx.Node) -> None:
    query: Any = node.args[0]
    mask: Any = node.kwargs["attn_mask"]
    rows, heads, width, size = _shape(query)
    shared = _shape(keys)[1]
    group = heads // shared
    with graph.inserting_before(node):
        joined = graph.call_function(aten.reshape.default, (query, [rows, shared, group * width, size]))
        repeated = graph.call_function(aten.repeat.default, (mask, [1, 1, group, 1]))
        kwargs = {**node.kwargs, "attn_mask": repeated}
        attention = graph.call_function(ATTENTION, (joined, keys, values), kwargs)
    for user in _used(node):
        with graph.inserting_before(user):
            output = graph.call_function(operator.getitem, (attention, 0))
            apart = graph.call_function(aten.reshape.default, (output, [rows, heads, width, size]))
            # laid out as attention leaves it: by tokens, then by heads
            by_token = graph.call_function(aten.transpose.int, (apart, 1, 2))
            copied = graph.call_function(aten.clone.default, (by_token,), {"memory_format": torch.contiguous_format})
            by_head = graph.call_function(aten.transpose.int, (copied, 1, 2))
        user.replace_all_uses_with(by_head)
    for one in (*node.users, node):  # which counts as one with side effects, since it could draw random numbers
        graph.erase_node(one)


def _before_repeating(node: Any) -> fx.Node | None:
    """K or V as they are stored, if `node` is (rows, shared * group, slots, size) of (rows, shared, slots, size)."""
    steps = (VIEWS, (aten.clone.default,), (aten.expand.default,), (aten.unsqueeze.default,))
    shape = _shape(node)
    for targets in steps:
        if not isinstance(node, fx.Node) or node.target not in targets:
            return None
        last, node = node, node.args[0]
    stored = _shape(node)
    is_repeated = last.args[1] == 2 and len(shape) == len(stored) == 4 and shape[1] % stored[1] == 0
    return node if is_repeated and (shape[0], *shape[2:]) == (stored[0], *stored[2:]) else None


def _used(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.users]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
