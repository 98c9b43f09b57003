"""Where draft tokens come from: n-grams of the context, and the exit heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .costs import CostTable
from .engine import DraftEngine
from .ngrams import MAX_NGRAM, NgramIndex
from .policy import MAX_DRAFT, AcceptanceTable, Option, choose, choose_continuation, worth_another_draft

UNREAD = -1  # stands for a draft token that is still on the device
LEARNING = 0.1  # of what a round found, for the calls to come
COMING_BACK = 0.05  # of the way to its prior, at each new call
# What a round keeps of what was observed of the heads: a few drafts in a row that failed must not end drafting for the
# rest of the answer, where nothing would be observed any more.
HEAD_MEMORY = 0.95
# What an n-gram match of this length is taken to be worth before the text has shown it.
NGRAM_PRIORS = {1: 0.05, 2: 0.2, 3: 0.35, 4: 0.5, MAX_NGRAM: 0.7}


@dataclass(frozen=True)
class Piece:
    """A part of a draft that one source wrote.

    Attributes:
        source: Its name.
        length: Draft tokens.
        exit_layer: The layer that drafted them, 0 where no layer ran.
    """

    source: str
    length: int
    exit_layer: int = 0


@dataclass
class Draft:
    """Draft tokens of one row in one round; sources may take turns.

    Attributes:
        tokens: The tokens, possibly none.
        pieces: Who drafted them, in order.
    """

    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, tokens: list[int], source: str, exit_layer: int = 0) -> Draft:
        """Append what `source` drafted; return self."""
        if tokens:
            self.tokens = [*self.tokens, *tokens]
            self.pieces.append(Piece(source, len(tokens), exit_layer))
        return self

    def exit_layer_of(self, position: int) -> int:
        """The layer that drafted the token at `position`, 0 where no layer ran."""
        for piece in self.pieces:
            if position < piece.length:
                return piece.exit_layer
            position -= piece.length
        return 0


class Drafter(Protocol):
    """What the self-speculative loop asks of a drafter."""

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft at most `limits[i]` tokens for each row `rows[i]` that still decodes."""

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Learn what became of a row's draft; `new_tokens` were added to its sequence."""


class HybridDrafter:
    """Asks the policy before each round which source to use, if any.

    Args:
        prompts: The prompt of each row.
        costs_of: Measured costs by number of rows, kept between calls.
        head_priors: Agreement of each exit layer's head on held-out text; only these layers draft.
        engine: Runs the draft heads; `None` where there are none.
        learned: What earlier calls of this kind found each source's acceptance to be; updated. It comes back to the
            priors by and by, or a source that once was no good would never be tried again.
    """

    def __init__(
        self,
        prompts: Iterable[Iterable[int]],
        costs_of: Callable[[int], CostTable],
        head_priors: dict[int, float],
        engine: DraftEngine | None = None,
        learned: dict[str, float] | None = None,
    ) -> None:
        self.indexes = [NgramIndex(prompt) for prompt in prompts]
        self.costs_of = costs_of
        self.engine = engine
        self.heads = sorted(head_priors) if engine is not None else []
        priors = {_ngram(length): prior for length, prior in NGRAM_PRIORS.items()}
        priors |= {_head(layer): prior for layer, prior in head_priors.items()}
        self.learned = learned if learned is not None else {}
        for source, prior in priors.items():
            before = self.learned.get(source, prior)
            self.learned[source] = before + COMING_BACK * (prior - before)
        self.acceptances = AcceptanceTable({source: self.learned[source] for source in priors})

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft from the best source, and go on with another where that pays; nothing where plain decoding is best."""
        for exit_layer in self.heads:
            self.acceptances.forget(_head(exit_layer), HEAD_MEMORY)
        limits = [min(limit, MAX_DRAFT) for limit in limits]
        costs = self.costs_of(len(rows))
        matches = [self.indexes[row].match() for row in rows]
        choice = choose(self._options(limits, matches), costs)
        drafts = [Draft() for _ in rows]
        if choice.option is None:
            return drafts
        lengths = [min(choice.num_assistant_tokens, limit) for limit in limits]
        is_unread = self.engine is not None and not self.engine.reads_drafts  # sources then take no turns
        if choice.option.exit_layer and is_unread:
            return self._draft_unread(choice.option.exit_layer, lengths, drafts)
        if choice.option.exit_layer:
            survivals = self._draft_with_head(
                choice.option.exit_layer, rows, lengths, drafts, [1.0] * len(rows), costs, choice.ms_per_token
            )
            self._continue_with_ngrams(rows, limits, drafts, survivals, costs)
            return drafts
        survivals = []
        for row, length, draft, (match_length, position) in zip(rows, lengths, drafts, matches, strict=True):
            if match_length:
                draft.add(self.indexes[row].continuation(position, length), _ngram(match_length))
            survivals.append(self.acceptances.probability(_ngram(match_length)) ** length if match_length else 0.0)
        if not is_unread:
            self._continue_with_head(rows, limits, drafts, survivals, costs, choice.ms_per_token)
        return drafts

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Update the n-grams and the acceptance of the sources."""
        self.indexes[row].extend(new_tokens)
        for piece in draft.pieces:
            self.acceptances.record(piece.source, piece.length, min(n_matches, piece.length))
            found = self.acceptances.probability(piece.source)
            self.learned[piece.source] += LEARNING * (found - self.learned[piece.source])
            n_matches -= piece.length
            if n_matches < 0:
                break  # what stands behind a rejected token was never judged

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

    def _draft_unread(self, exit_layer: int, lengths: list[int], drafts: list[Draft]) -> list[Draft]:
        """Let a head draft tokens that are not seen before they are verified."""
        if self.engine is not None:
            self.engine.draft_unread(exit_layer, max(lengths))
        for draft, length in zip(drafts, lengths, strict=True):
            draft.add([UNREAD] * length, _head(exit_layer), exit_layer)
        return drafts

    def _draft_with_head(
        self,
        exit_layer: int,
        rows: list[int],
        lengths: list[int],
        drafts: list[Draft],
        survivals: list[float],
        costs: CostTable,
        ms_per_token: float,
    ) -> list[float]:
        """Add a head's tokens to the drafts of all rows together, until their routers doubt that one more pays.

        Args:
            exit_layer: The layer of the head.
            rows: The rows.
            lengths: How many tokens each draft may get.
            drafts: What the rows have drafted so far, all of one length; added to.
            survivals: For each row the probability that all of that is accepted.
            costs: Measured costs of a batch of this size.
            ms_per_token: As `policy.worth_another_draft` takes it.

        Returns:
            The survivals after the new tokens.
        """
        engine = self.engine
        if engine is None:
            return survivals
        before = drafted = [draft.tokens for draft in drafts]
        own = self.acceptances.probability(_head(exit_layer))
        for _ in range(max(lengths)):
            tokens, scores = engine.draft(exit_layer, drafted)
            survivals = [survival * score for survival, score in zip(survivals, scores, strict=True)]
            drafted = [[*tokens_before, token] for tokens_before, token in zip(drafted, tokens, strict=True)]
            if not worth_another_draft(survivals, own, len(drafted[0]), exit_layer, costs, ms_per_token):
                break
            if all(self._ngram_chance(row, tokens)[0] >= own for row, tokens in zip(rows, drafted, strict=True)):
                break  # an n-gram goes on from here, as well and for nothing
        engine.rollback()
        for draft, tokens, start, length in zip(drafts, drafted, before, lengths, strict=True):
            draft.add(tokens[len(start) :][:length], _head(exit_layer), exit_layer)
        return survivals

    def _continue_with_ngrams(
        self, rows: list[int], limits: list[int], drafts: list[Draft], survivals: list[float], costs: CostTable
    ) -> None:
        """Let n-grams go on where a head stopped, as far as the wider verify pass is worth it."""
        chances = [self._ngram_chance(row, draft.tokens) for row, draft in zip(rows, drafts, strict=True)]
        offers = tuple(
            (probability, limit - len(draft.tokens))
            for (probability, _, _), limit, draft in zip(chances, limits, drafts, strict=True)
        )
        drafted = max(len(draft.tokens) for draft in drafts)
        length = choose_continuation(offers, survivals, drafted, costs)
        for row, draft, (_, match_length, position), (_, room) in zip(rows, drafts, chances, offers, strict=True):
            if match_length:
                tokens = self.indexes[row].continuation(position, min(length, room), draft.tokens)
                draft.add(tokens, _ngram(match_length))

    def _continue_with_head(
        self,
        rows: list[int],
        limits: list[int],
        drafts: list[Draft],
        survivals: list[float],
        costs: CostTable,
        ms_per_token: float,
    ) -> None:
        """Let a head go on behind n-grams where it is surer than they are; rows have to stand at one length."""
        drafted = len(drafts[0].tokens)
        room = min(limits) - drafted
        if room <= 0 or any(len(draft.tokens) != drafted for draft in drafts):
            return
        for exit_layer in self.heads:
            if self.engine is not None and exit_layer == self.engine.block_layer:
                continue  # it lacks the deep state of the n-gram's last token
            sure = self.acceptances.probability(_head(exit_layer))
            if worth_another_draft(survivals, sure, drafted, exit_layer, costs, ms_per_token, catch_up=True):
                lengths = [room] * len(rows)
                self._draft_with_head(exit_layer, rows, lengths, drafts, survivals, costs, ms_per_token)
                return

    def _ngram_chance(self, row: int, drafted: list[int]) -> tuple[float, int, int]:
        """Acceptance, length and position of the n-gram that goes on after `drafted`."""
        match_length, position = self.indexes[row].match(drafted)
        return (self.acceptances.probability(_ngram(match_length)) if match_length else 0.0), match_length, position


def _ngram(length: int) -> str:
    return f"{length}-gram"


def _head(exit_layer: int) -> str:
    return f"exit layer {exit_layer}"
