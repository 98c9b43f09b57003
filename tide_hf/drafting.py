"""Where draft tokens come from: n-grams of the context, and the exit heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .policy import MAX_DRAFT, AcceptanceTable, CostTable, Option, choose, worth_another_draft

MAX_NGRAM = 5
# What an n-gram match of this length is taken to be worth before the text has shown it.
NGRAM_PRIORS = {1: 0.05, 2: 0.2, 3: 0.35, 4: 0.5, MAX_NGRAM: 0.7}


@dataclass
class Draft:
    """Draft tokens of one row in one round.

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

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft at most `limits[i]` tokens for each row `rows[i]` that still decodes."""

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Learn what became of a row's draft; `new_tokens` were added to its sequence."""


class ShallowDecoder(Protocol):
    """The shallow layers of the model, as the exit heads use them."""

    def step(self, exit_layer: int, tokens: list[list[int]]) -> tuple[list[int], list[float]]:
        """Decode one token for each row after its sequence and its `tokens`: the tokens and their exit scores."""

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
        prompts: The prompt of each row.
        costs_of: Measured costs by number of rows, kept between calls.
        head_priors: Agreement of each exit layer's head on held-out text; only these layers draft.
        shallow: The model's shallow layers; `None` where there are no exit heads.
    """

    def __init__(
        self,
        prompts: Iterable[Iterable[int]],
        costs_of: Callable[[int], CostTable],
        head_priors: dict[int, float],
        shallow: ShallowDecoder | None = None,
    ) -> None:
        self.indexes = [NgramIndex(prompt) for prompt in prompts]
        self.costs_of = costs_of
        self.shallow = shallow
        self.heads = sorted(head_priors) if shallow is not None else []
        priors = {_ngram(length): prior for length, prior in NGRAM_PRIORS.items()}
        self.acceptances = AcceptanceTable(priors | {_head(layer): prior for layer, prior in head_priors.items()})

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft from the best source; nothing where plain decoding is better."""
        limits = [min(limit, MAX_DRAFT) for limit in limits]
        costs = self.costs_of(len(rows))
        matches = [self.indexes[row].match() for row in rows]
        choice = choose(self._options(limits, matches), costs)
        if choice.option is None:
            return [Draft() for _ in rows]
        lengths = [min(choice.num_assistant_tokens, limit) for limit in limits]
        if choice.option.exit_layer:
            return self._draft_with_head(choice.option.exit_layer, lengths, costs)
        drafts = []
        for row, length, (match_length, position) in zip(rows, lengths, matches, strict=True):
            tokens = self.indexes[row].continuation(position, length) if match_length else []
            drafts.append(Draft(tokens, _ngram(match_length)))
        return drafts

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Update the n-grams and the acceptance of the source."""
        self.indexes[row].extend(new_tokens)
        if draft.tokens:
            self.acceptances.record(draft.source, len(draft.tokens), n_matches)

    def _options(self, limits: list[int], matches: list[tuple[int, int]]) -> list[Option]:
        options = []
        if any(match_length for match_length, _ in matches):
            probabilities = [
                self.acceptances.probability(_ngram(match_length)) if match_length else 0.0
                for match_length, _ in matches
            ]
            on_offer = [limit if match_length else 0 for limit, (match_length, _) in zip(limits, matches, strict=True)]
            options.append(Option("n-gram", tuple(zip(probabilities, on_offer, strict=True))))
        for exit_layer in self.heads:
            acceptance = self.acceptances.probability(_head(exit_layer))
            options.append(Option(_head(exit_layer), tuple((acceptance, limit) for limit in limits), exit_layer))
        return options

    def _draft_with_head(self, exit_layer: int, lengths: list[int], costs: CostTable) -> list[Draft]:
        """Draft all rows together until their routers doubt that one more token pays."""
        if self.shallow is None:
            return [Draft() for _ in lengths]
        drafted: list[list[int]] = [[] for _ in lengths]
        survivals = [1.0] * len(lengths)
        for count in range(1, max(lengths) + 1):
            tokens, scores = self.shallow.step(exit_layer, drafted)
            survivals = [survival * score for survival, score in zip(survivals, scores, strict=True)]
            drafted = [[*before, token] for before, token in zip(drafted, tokens, strict=True)]
            if not worth_another_draft(survivals, count, exit_layer, costs):
                break
        self.shallow.rollback()
        return [
            Draft(tokens[:length], _head(exit_layer), exit_layer)
            for tokens, length in zip(drafted, lengths, strict=True)
        ]


def _ngram(length: int) -> str:
    return f"{length}-gram"


def _head(exit_layer: int) -> str:
    return f"exit layer {exit_layer}"
