"""The state of the block head that a returned cache carries to the next call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .kv_cache import crop

ATTRIBUTE = "_tide_block"  # of a cache, holding a `BlockState`


@dataclass
class BlockState:
    """The block head's state on a returned cache, with which a call that continues from it can draft.

    Attributes:
        made_by: The block head's [`BlockPoint.identity`].
        layer: Its K/V, of the cache's first tokens.
        prev_hidden_state: (rows, 1, D) last hidden state, after the final norm, of the last of these tokens.
    """

    made_by: str
    layer: DynamicLayer
    prev_hidden_state: Tensor | None

    def leave_with(self, cache: Any) -> None:
        """Attach it to the cache, for [`block_state_of`]."""
        setattr(cache, ATTRIBUTE, self)


def block_state_of(cache: Any, identity: str) -> BlockState | None:
    """Detach the state of a block from a cache; an empty one for an empty cache, `None` where it does not fit."""
    state = vars(cache).pop(ATTRIBUTE, None)
    length = cache.get_seq_length()
    if length == 0:
        return BlockState(identity, DynamicLayer(), None)
    if state is None or state.made_by != identity or len(state.layer.keys) != len(cache.layers[0].keys):
        return None
    surplus = state.layer.get_seq_length() - length
    if surplus < 0:  # tokens were added without the block
        return None
    if surplus > 0:  # the cache was cropped, so the hidden state of its last token is unknown
        crop(state.layer, surplus)
        state.prev_hidden_state = None
    return state
