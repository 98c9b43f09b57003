"""What a cache that goes from call to call keeps for the block head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .kv_cache import crop

MEMORY = "_tide_block"  # the attribute of a cache that has a `BlockMemory`


@dataclass
class BlockMemory:
    """What a cache that is returned keeps for the block, so that a call that goes on behind it can draft.

    Attributes:
        made_by: The block, by [`BlockPoint.identity`].
        layer: Its K/V, which are those of the cache's first tokens.
        deep_before: (rows, 1, D) normalised final state of the last of them.
    """

    made_by: str
    layer: DynamicLayer
    deep_before: Tensor | None

    def leave_with(self, cache: Any) -> None:
        """Put it into the cache, for [`memory_of`]."""
        setattr(cache, MEMORY, self)


def memory_of(cache: Any, identity: str) -> BlockMemory | None:
    """Take what a cache keeps for a block; of an empty one nothing is needed."""
    memory = vars(cache).pop(MEMORY, None)
    length = cache.get_seq_length()
    if length == 0:
        return BlockMemory(identity, DynamicLayer(), None)
    if memory is None or memory.made_by != identity or len(memory.layer.keys) != len(cache.layers[0].keys):
        return None
    surplus = memory.layer.get_seq_length() - length
    if surplus < 0:  # the cache has grown without the block
        return None
    if surplus > 0:  # it was cut back; what stood before its last token now is not known
        crop(memory.layer, surplus)
        memory.deep_before = None
    return memory
