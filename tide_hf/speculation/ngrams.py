"""Where the end of a text stood in it before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_NGRAM = 5


class NgramIndex:
    """Finds where the longest suffix of a sequence occurred before (prompt lookup, with several lengths).

    Args:
        tokens: The sequence so far.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(MAX_NGRAM + 1)]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the sequence."""
        for token in tokens:
            position = len(self.tokens)
            for length in range(1, min(MAX_NGRAM, position) + 1):
                self._next[length][tuple(self.tokens[position - length :])] = position
            self.tokens.append(token)

    def match(self, drafted: Sequence[int] = ()) -> tuple[int, int]:
        """Find the longest suffix of the sequence and `drafted` that the sequence had before.

        Returns:
            The suffix's length and the position after its latest occurrence; (0, 0) if there is none.
        """
        end = [*self.tokens[-MAX_NGRAM:], *drafted]
        for length in range(min(MAX_NGRAM, len(self.tokens) + len(drafted)), 0, -1):
            position = self._next[length].get(tuple(end[-length:]))
            if position is not None:
                return length, position
        return 0, 0

    def continuation(self, position: int, num_tokens: int, drafted: Sequence[int] = ()) -> list[int]:
        """The `num_tokens` tokens from `position` on; past the end the text is taken to go on repeating."""
        period = len(self.tokens) + len(drafted) - position
        text = self.tokens[position : position + num_tokens] + list(drafted)[:num_tokens]
        return [text[offset % period] for offset in range(num_tokens)]
