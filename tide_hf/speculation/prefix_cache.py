"""The K/V cache of the last call, for a prompt that begins with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer

from ..base_model.structure import rope_limits
from ..depth.kv_cache import crop


class PrefixCache:
    """The K/V cache of the last call with a single sequence.

    Args:
        config: The model's config.
    """

    def __init__(self, config: Any) -> None:
        self.config = config.get_text_config(decoder=True)
        self._tokens: list[int] = []
        self._cache: DynamicCache | None = None

    def take(self, prompt: Sequence[int]) -> DynamicCache:
        """A cache with the K/V of the tokens that the prompt shares with the last text; empty where there are none.

        The call may write to it. If the call succeeds, give the cache to [`PrefixCache.keep`]; if not, drop it.

        Args:
            prompt: All of its tokens; at least the last is left to feed.
        """
        shared = num_shared(self._tokens, prompt[:-1])
        surplus = len(self._tokens) - shared
        cache, self._cache, self._tokens = self._cache, None, []
        # K/V of rotary embeddings that change with the length are not those of a longer text.
        rope_changes = any(limit < len(prompt) for limit in rope_limits(self.config).values())
        if cache is None or shared == 0 or rope_changes:
            return DynamicCache(config=self.config)
        if surplus and any(type(layer) is not DynamicLayer for layer in cache.layers):
            return DynamicCache(config=self.config)  # a sliding window cannot be cropped
        for layer in cache.layers if surplus else ():
            crop(layer, surplus)
        return cache

    def keep(self, cache: DynamicCache, tokens: Sequence[int]) -> None:
        """Keep what a call has left, for the next one.

        Args:
            cache: Its cache.
            tokens: Of prompt and answer; the last may have no K/V.
        """
        self._cache, self._tokens = cache, list(tokens)[: cache.get_seq_length()]


def num_shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
