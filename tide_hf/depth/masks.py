"""Masks that count tokens and not slots: of passes over trees of draft tokens, and over caches with rejected tokens.

transformers makes the masks of a pass from slots: a token attends to the slots before its own, and windows count slots.
Here, the same functions are asked about tokens: siblings of a tree stand at one position, a node attends to its own
ancestors alone, and rejected tokens are skipped. So windows and chunks of any family count tokens along a node's path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

TREE_ATTENTION = ("sdpa", "eager", "tide_gqa")  # attention implementations whose masks can be those of trees


@dataclass(frozen=True)
class PassTree:
    """The tree that a pass reads in each row, whose root is the row's last token.

    Attributes:
        parents: (rows, width) index of the token that each one follows, among those of the pass; -1 for the root.
        depths: (rows, width) tokens between the root and each one, itself included; 0 for the root.
        attended: (rows, width, width) whether a token attends to another of the pass: its ancestors and itself.
    """

    parents: Tensor
    depths: Tensor
    attended: Tensor

    @classmethod
    def of(cls, parents: Sequence[Sequence[int]], device: torch.device) -> PassTree:
        """The tree of these parents; a token comes after its parent."""
        depths, attended = [], []
        for row in parents:
            own_depths: list[int] = []
            own_attended: list[list[bool]] = []
            for index, parent in enumerate(row):
                own_depths.append(own_depths[parent] + 1 if parent >= 0 else 0)
                seen = list(own_attended[parent]) if parent >= 0 else [False] * len(row)
                seen[index] = True
                own_attended.append(seen)
            depths.append(own_depths)
            attended.append(own_attended)
        made = (torch.tensor(values, device="cpu") for values in (list(map(list, parents)), depths, attended))
        return cls(*(tensor.to(device) for tensor in made))


_tree: ContextVar[PassTree | None] = ContextVar("tree", default=None)
_rejected: ContextVar[Tensor | None] = ContextVar("rejected slots", default=None)


@contextmanager
def reading_tree(tree: PassTree | None) -> Iterator[None]:
    """Let the masks of a pass be those of a tree; `None` for a chain."""
    token = _tree.set(tree)
    try:
        yield
    finally:
        _tree.reset(token)


def current_tree() -> PassTree | None:
    """The tree of the running pass; `None` for a chain."""
    return _tree.get()


@contextmanager
def skipping_rejected(rejected: Tensor | None) -> Iterator[None]:
    """Let masks skip rejected tokens; see `engines.gqa_attention.can_skip_rejected`.

    `rejected`, (rows, slots) int64, is 1 at slots of rejected tokens and else 0; `None` where no window counts slots.
    """
    token = _rejected.set(rejected)
    try:
        yield
    finally:
        _rejected.reset(token)


def by_tokens(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Let a function of transformers that makes (rows, 1, width, slots) masks count tokens, within the contexts."""

    def mask_tokens(*, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> Tensor | None:
        if torch.compiler.is_dynamo_compiling():  # which cannot read context variables; no pass of ours is running
            return make_mask(mask_function=mask_function, **kwargs)
        rejected, tree = _rejected.get(), _tree.get()
        if rejected is not None:
            tokens = torch.arange(rejected.shape[1], device=rejected.device) - (rejected.cumsum(dim=1) - rejected)
            mask_function = _of_tokens(mask_function, tokens)
        if tree is not None:
            mask_function = _of_nodes(mask_function, tree, kwargs.get("q_offset", 0))
            kwargs["allow_is_causal_skip"] = False
        return make_mask(mask_function=mask_function, **kwargs)

    return mask_tokens


def _of_tokens(mask_function: Callable[..., Any], tokens: Tensor) -> Callable[..., Any]:
    """A mask function of slots, as one of the token in each slot, (rows, slots)."""

    def of_tokens(row: Any, head: Any, query_slot: Any, slot: Any) -> Any:
        return mask_function(row, head, tokens[row, query_slot], tokens[row, slot])

    return of_tokens


def _of_nodes(mask_function: Callable[..., Any], tree: PassTree, start: Any) -> Callable[..., Any]:
    """A mask function, as one of a tree whose root is in the slot `start`: of a chain in the slots of a node's path."""
    last = tree.depths.shape[1] - 1

    def of_nodes(row: Any, head: Any, query_slot: Any, slot: Any) -> Any:
        query, key = query_slot - start, slot - start
        node = key.clamp(0, last)  # of slots before the pass, any
        path_slot = torch.where(key < 0, slot, start + tree.depths[row, node])
        sees = mask_function(row, head, start + tree.depths[row, query], path_slot)
        return sees & ((key < 0) | ((key <= last) & tree.attended[row, query, node]))

    return of_nodes


# Outside of the contexts above, these are transformers' own masks.
AttentionMaskInterface.register("sdpa", by_tokens(sdpa_mask))
AttentionMaskInterface.register("eager", by_tokens(eager_mask))
