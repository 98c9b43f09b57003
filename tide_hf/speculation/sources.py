"""What offers nodes to the trees of drafts without a model: n-grams of the row, earlier answers, and successors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from ..common.token_sources import SUCCESSOR, ngram_source, remembered_source
from .answer_memory import MATCH_LENGTHS, AnswerMemory
from .policy import TOP_DRAFTS, Key
from .successors import SuccessorTable

MAX_NGRAM = 5
CONTINUATIONS = 4  # of an n-gram: the latest different tokens after it
NGRAM_SOURCES = {length: ngram_source(length) for length in range(1, MAX_NGRAM + 1)}
REMEMBERED_SOURCES = {length: remembered_source(length) for length in MATCH_LENGTHS}


class Offer(NamedTuple):
    """A token that a source offers as the next one at some place of a tree."""

    token: int
    source: str
    rank: int = 0  # among the tokens that the source offers there, by which its acceptance is learned
    score: float | None = None  # the probability that the source gives it, if it gives any
    exit_layer: int = 0  # layers executed to draft it


class TreeSource(Protocol):
    """Offers nodes to the trees of one call's rows."""

    priors: ClassVar[dict[Key, float]]  # acceptance by source and rank of what it offers, before any is observed

    def offers(self, row: int, path: Sequence[int]) -> list[Offer]:
        """The tokens that may follow a row's text and the tokens of a path, the likeliest first."""

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Take in what a round has added to a row."""


class NgramIndex:
    """Finds what followed the longest suffixes of a sequence where they occurred before (prompt lookup)."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        # By n-gram, the latest different tokens after it, the latest first.
        self._next: list[dict[tuple[int, ...], tuple[int, ...]]] = [{} for _ in range(MAX_NGRAM + 1)]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the sequence."""
        for token in tokens:
            end = tuple(self.tokens[-MAX_NGRAM:])
            for length in range(1, len(end) + 1):
                after, ngram = self._next[length], end[-length:]
                others = [other for other in after.get(ngram, ()) if other != token]
                after[ngram] = (token, *others[: CONTINUATIONS - 1])
            self.tokens.append(token)

    def after(self, path: Sequence[int] = ()) -> list[tuple[int, int, int]]:
        """The tokens that followed the longest suffixes of sequence + `path`: (length, rank, token), no token twice."""
        end = (*self.tokens[-MAX_NGRAM:], *path)[-MAX_NGRAM:]
        found: list[tuple[int, int, int]] = []
        seen: list[int] = []
        for length in range(len(end), 0, -1):
            for rank, token in enumerate(self._next[length].get(end[-length:], ())):
                if token not in seen:
                    found.append((length, rank, token))
                    seen.append(token)
            if len(seen) >= CONTINUATIONS:
                break
        return found


class Ngrams:
    """Tokens that followed the end of a row's text where its last n-gram occurred before in that text."""

    # The longer the match, the likelier; and so with tokens that followed it later.
    priors: ClassVar[dict[Key, float]] = {
        (NGRAM_SOURCES[length], rank): prior * share
        for length, prior in {1: 0.05, 2: 0.2, 3: 0.35, 4: 0.5, MAX_NGRAM: 0.7}.items()
        for rank, share in enumerate((1.0, 0.4, 0.2, 0.1))
    }

    def __init__(self, prompts: Iterable[Iterable[int]]) -> None:
        self.indexes = [NgramIndex(prompt) for prompt in prompts]

    def offers(self, row: int, path: Sequence[int]) -> list[Offer]:
        """See `TreeSource.offers`."""
        return [Offer(token, NGRAM_SOURCES[length], rank) for length, rank, token in self.indexes[row].after(path)]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See `TreeSource.extend`."""
        self.indexes[row].extend(tokens)


class EarlierAnswers:
    """Tokens that followed the row's last n-gram in an earlier answer.

    The priors are so low that little is drafted from them before they have been right in this model's calls: what they
    offer is compared with each round's tokens all the same.
    """

    priors: ClassVar[dict[Key, float]] = {(source, 0): 0.04 for source in REMEMBERED_SOURCES.values()}

    def __init__(self, prompts: Iterable[Sequence[int]], memory: AnswerMemory) -> None:
        self.memory, self._ends = memory, [list(prompt[-MATCH_LENGTHS[-1] :]) for prompt in prompts]

    def offers(self, row: int, path: Sequence[int]) -> list[Offer]:
        """See `TreeSource.offers`."""
        length, tokens = self.memory.find((*self._ends[row], *path)[-MATCH_LENGTHS[-1] :], 1)
        return [Offer(token, REMEMBERED_SOURCES[length]) for token in tokens]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See `TreeSource.extend`."""
        self._ends[row] = [*self._ends[row], *tokens][-MATCH_LENGTHS[-1] :]


class Successors:
    """Tokens that earlier passes gave after the row's last token alone."""

    priors: ClassVar[dict[Key, float]] = {(SUCCESSOR, rank): 0.3 / (1 + 1.5 * rank) for rank in range(TOP_DRAFTS)}

    def __init__(self, prompts: Iterable[Sequence[int]], table: SuccessorTable) -> None:
        self.table, self._last = table, [prompt[-1] if prompt else -1 for prompt in prompts]

    def offers(self, row: int, path: Sequence[int]) -> list[Offer]:
        """See `TreeSource.offers`."""
        after = self.table.after(path[-1] if path else self._last[row])
        return [Offer(token, SUCCESSOR, rank) for rank, token in enumerate(after)]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """See `TreeSource.extend`."""
        self._last[row] = tokens[-1] if tokens else self._last[row]
