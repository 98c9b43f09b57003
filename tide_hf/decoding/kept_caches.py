"""K/V of texts that a model has read or written, for prompts that begin as one of them did."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer

from ..depth.kv_cache import crop
from ..structure import rope_limits


@dataclass(frozen=True, eq=False)
class _Kept:
    tokens: list[int]
    cache: DynamicCache


class KeptCaches:
    """The caches of the last calls of single sequences.

    Args:
        config: The model's config.
        most: How many are kept; the oldest goes first.
        least_shared: Tokens that a prompt has to share with one to go on behind it.
    """

    def __init__(self, config: Any, most: int = 1, least_shared: int = 1) -> None:
        self.config = config.get_text_config(decoder=True)
        self.most = most
        self.least_shared = least_shared
        self._kept: list[_Kept] = []

    def take(self, prompt: Sequence[int]) -> DynamicCache:
        """A cache with the K/V of as much of the beginning of a prompt as is known, possibly nothing.

        The call may write to it. If it fails the cache is of no use any more; if not, [`KeptCaches.keep`] takes it.

        Args:
            prompt: All of its tokens; of these the last is fed in any case.
        """
        shared, kept = max(
            ((num_shared(kept.tokens, prompt[:-1]), kept) for kept in self._kept),
            key=lambda one: one[0],
            default=(0, None),
        )
        changes = any(limit < len(prompt) for limit in rope_limits(self.config).values())  # of K/V with the length
        if kept is None or shared < self.least_shared or changes:
            return DynamicCache(config=self.config)
        surplus = len(kept.tokens) - shared
        if surplus and any(type(layer) is not DynamicLayer for layer in kept.cache.layers):
            return DynamicCache(config=self.config)  # a window cannot be cut back
        if surplus > shared and self.most > 1:  # another text that begins alike, and may go on
            cache = deepcopy(kept.cache)
        else:
            self._kept.remove(kept)
            cache = kept.cache
        for layer in cache.layers if surplus else ():
            crop(layer, surplus)
        return cache

    def keep(self, cache: DynamicCache, tokens: Sequence[int]) -> None:
        """Keep what a call has left.

        Args:
            cache: Its cache.
            tokens: Of prompt and answer; of the last there may be no K/V.
        """
        if self.most and cache.get_seq_length():
            self._kept = [*self._kept, _Kept(list(tokens)[: cache.get_seq_length()], cache)][-self.most :]


def num_shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Tokens in front of the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
