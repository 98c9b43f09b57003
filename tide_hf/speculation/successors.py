"""For each token, the likeliest ones after it, as earlier passes gave them (Token Recycling, arXiv 2408.08696)."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from ..common.choices import SUCCESSORS


class SuccessorTable:
    """The likeliest successors of each token that a model's passes have read lately. Threads may share it.

    It costs nothing to fill, since a pass computes the logits after each token that it verifies, accepted or not. The
    copy or pickle of a table is empty, since it tells something of the texts that it has seen.

    Args:
        max_tokens: Tokens whose successors are kept at most, at 0.3 kB each; those not read for the longest time leave
            first. 0 keeps nothing.
    """

    def __init__(self, max_tokens: int = SUCCESSORS) -> None:
        self.max_tokens = max_tokens
        self._after: dict[int, tuple[int, ...]] = {}  # the latest token last
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._after)

    def see(self, tokens: Sequence[int], successors: Sequence[Sequence[int]]) -> None:
        """Take in what a pass gave after each of `tokens`, best first."""
        if not self.max_tokens:
            return
        with self._lock:
            for token, after in zip(tokens, successors, strict=True):
                self._after.pop(token, None)
                self._after[token] = tuple(after)
            while len(self._after) > self.max_tokens:
                del self._after[next(iter(self._after))]

    def after(self, token: int) -> tuple[int, ...]:
        """The likeliest tokens after one, best first; possibly none."""
        return self._after.get(token, ())

    def clear(self) -> None:
        """Forget all successors."""
        with self._lock:
            self._after.clear()

    def __reduce__(self) -> tuple:
        return SuccessorTable, (self.max_tokens,)
