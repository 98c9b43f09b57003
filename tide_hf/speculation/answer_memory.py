"""Answers of earlier calls, to draft from (compare SuffixDecoding, arXiv 2411.04975, which keeps a suffix tree)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock

from ..common.choices import REMEMBERED_TOKENS

# Numbers of tokens that have to match. Four find a phrase or the next field of a form, twelve reach over what a chat
# template puts between question and answer, and 32 say that it is the same question.
MATCH_LENGTHS = (4, 12, 32)

_Place = tuple[tuple[int, ...], int]  # a remembered text, and a position in it


class AnswerMemory:
    """The latest answers of one model, as token ids in RAM. Calls in several threads may share it.

    A dictionary has, for each n-gram of `MATCH_LENGTHS`, the place after its latest occurrence. Finding a match takes
    some 4 microseconds, adding an answer some 8 microseconds a token, and a token takes 0.4 kB. The copy or pickle of a
    memory is empty, so that no answer leaves the process by it.

    Args:
        max_tokens: Tokens that are remembered at most, among them the last 32 of the prompt before each answer; the
            oldest answers leave first, and a longer answer is not remembered. 0 remembers nothing.
    """

    def __init__(self, max_tokens: int = REMEMBERED_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._texts: dict[tuple[tuple[int, ...], int], None] = {}  # with the answer's begin; oldest first
        self._next: dict[int, _Place] = {}  # by the hash of an n-gram
        self._lock = Lock()

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember an answer, and as what led to it the end of its prompt."""
        before = prompt[-MATCH_LENGTHS[-1] :]
        text, begin = (*before, *answer), len(before)
        if len(text) > self.max_tokens:
            return
        with self._lock:
            if (text, begin) in self._texts:  # it becomes the latest, and all its n-grams are overwritten below
                del self._texts[text, begin]
                self.num_tokens -= len(text)
            while self.num_tokens + len(text) > self.max_tokens:
                self._forget_oldest()
            self._texts[text, begin] = None
            self.num_tokens += len(text)
            for ngram, position in _ngrams(text, begin):
                self._next[ngram] = (text, position)

    def find(self, end: Sequence[int], num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Find the longest n-gram at the end of a sequence, of which `end` has the last 32 tokens.

        Returns the n-gram's length and at most `num_tokens` tokens that followed it; (0, ()) if there is none.
        """
        with self._lock:
            for length in reversed(MATCH_LENGTHS):
                place = self._next.get(hash(tuple(end[-length:]))) if len(end) >= length else None
                if place is not None:
                    text, position = place
                    return length, text[position : position + num_tokens]
        return 0, ()

    def clear(self) -> None:
        """Forget all answers."""
        with self._lock:
            self._texts.clear()
            self._next.clear()
            self.num_tokens = 0

    def _forget_oldest(self) -> None:
        text, begin = next(iter(self._texts))
        del self._texts[text, begin]
        self.num_tokens -= len(text)
        for ngram, _ in _ngrams(text, begin):
            place = self._next.get(ngram)
            if place is not None and place[0] is text:  # else a later answer has this n-gram as well
                del self._next[ngram]

    def __reduce__(self) -> tuple:
        return AnswerMemory, (self.max_tokens,)


def _ngrams(text: tuple[int, ...], begin: int) -> Iterator[tuple[int, int]]:
    """The hash of each n-gram before a token after `begin`, and the token's position; prefill gives the first token."""
    for position in range(begin + 1, len(text)):
        for length in MATCH_LENGTHS:
            if length <= position:
                yield hash(text[position - length : position]), position
