"""Where draft tokens come from: n-grams of the context, and the exit heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .policy import MAX_DRAFT, AcceptanceTable, Candidate, CostTable, choose, worth_another_draft

MAX_NGRAM = 5
# What an n-gram match of this length is taken to be worth before the text has shown it.
NGRAM_PRIORS = {1: 0.1, 2: 0.3, 3: 0.5, 4: 0.65, MAX_NGRAM: 0.75}


@dataclass
class Draft:
    """Draft tokens of one round.

    Attributes:
        tokens: The tokens, possibly none.
        source: Who drafted them.
        exit_layer: The layer that drafted them, 0 where no layer ran.
    """

    tokens: list[int] = field(default_factory=list)
    source: str = "none"
    exit_layer: int = 0


class Drafter(Protocol):
    """What the self-speculative loop asks of a drafter."""

    def draft(self, limit: int) -> Draft:
        """Draft at most `limit` tokens."""

    def observe(self, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Learn what became of a draft; `new_tokens` were added to the sequence."""


class ShallowDecoder(Protocol):
    """The shallow layers of the model, as the exit heads use them."""

    def step(self, exit_layer: int, tokens: list[int]) -> tuple[int, float]:
        """Decode one token after the sequence and `tokens`, at `exit_layer`: the token and its exit score."""

    def rollback(self) -> None:
        """Forget the steps since the last rollback."""


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

    def match(self) -> tuple[int, int]:
        """Length of the longest known suffix and the position after its latest earlier occurrence; (0, 0) if none."""
        for length in range(min(MAX_NGRAM, len(self.tokens)), 0, -1):
            position = self._next[length].get(tuple(self.tokens[-length:]))
            if position is not None:
                return length, position
        return 0, 0

    def continuation(self, position: int, num_tokens: int) -> list[int]:
        """The `num_tokens` tokens from `position` on; past the end the text is taken to go on repeating."""
        period = len(self.tokens) - position
        return [self.tokens[position + offset % period] for offset in range(num_tokens)]


class HybridDrafter:
    """Asks the policy before each round which source to use, if any.

    Args:
        tokens: The prompt.
        costs: Measured costs, kept between calls.
        head_priors: Agreement of each exit layer's head on held-out text; only these layers draft.
        shallow: The model's shallow layers; `None` where there are no exit heads.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        costs: CostTable,
        head_priors: dict[int, float],
        shallow: ShallowDecoder | None = None,
    ) -> None:
        self.index = NgramIndex(tokens)
        self.costs = costs
        self.shallow = shallow
        self.heads = {f"exit layer {layer}": layer for layer in head_priors} if shallow is not None else {}
        priors = {f"{length}-gram": prior for length, prior in NGRAM_PRIORS.items()}
        priors |= {f"exit layer {layer}": prior for layer, prior in head_priors.items()}
        self.acceptances = AcceptanceTable(priors)

    def draft(self, limit: int) -> Draft:
        """Draft at most `limit` tokens from the best source; none where plain decoding is better."""
        limit = min(limit, MAX_DRAFT)
        if limit < 1:
            return Draft()
        match_length, position = self.index.match()
        candidates = [Candidate(source, limit, layer) for source, layer in self.heads.items()]
        if match_length:
            candidates.append(Candidate(f"{match_length}-gram", limit))
        choice = choose(candidates, self.costs, self.acceptances)
        if choice.source == "none":
            return Draft()
        if choice.source in self.heads:
            return self._draft_with_head(choice.source, choice.num_assistant_tokens)
        return Draft(self.index.continuation(position, choice.num_assistant_tokens), choice.source)

    def observe(self, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Update the n-grams and the acceptance of the source."""
        self.index.extend(new_tokens)
        if draft.tokens:
            self.acceptances.record(draft.source, len(draft.tokens), n_matches)

    def _draft_with_head(self, source: str, num_tokens: int) -> Draft:
        if self.shallow is None:
            return Draft()
        exit_layer = self.heads[source]
        draft = Draft(source=source, exit_layer=exit_layer)
        survival = 1.0
        while len(draft.tokens) < num_tokens:
            token, score = self.shallow.step(exit_layer, draft.tokens)
            survival *= score
            draft.tokens.append(token)
            if not worth_another_draft(survival, len(draft.tokens), exit_layer, self.costs):
                break
        self.shallow.rollback()
        return draft
