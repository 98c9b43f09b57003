"""Where draft tokens come from: n-grams of the context and of earlier answers, and the exit heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.token_sources import NGRAM, head_source, ngram_source, remembered_source
from .answer_memory import MATCH_LENGTHS, AnswerMemory
from .drafts import Accepted, Draft, num_shared
from .policy import MAX_DRAFT, AcceptanceTable, CostTable, Option, choose, choose_continuation, worth_another_draft
from .protocols import DraftEngine

MAX_NGRAM = 5
# The prior acceptance rate of n-gram matches, by their length.
NGRAM_PRIORS = {1: 0.05, 2: 0.2, 3: 0.35, 4: 0.5, MAX_NGRAM: 0.7}
# The same for n-grams of earlier answers, so low that nothing is drafted from them (see `policy.MIN_GAIN`) before they
# have been right in this model's calls: what they would have drafted is compared with each round's tokens all the same.
REMEMBERED_PRIOR = 0.04
NGRAM_SOURCES = {length: ngram_source(length) for length in NGRAM_PRIORS}
REMEMBERED_SOURCES = {length: remembered_source(length) for length in MATCH_LENGTHS}
LEARNING_RATE = 0.1  # share by which each draft moves the rates kept between calls towards the current estimate
PRIOR_RATE = 0.05  # share by which each call first moves these rates back to their priors
# Each round multiplies the weight of a head's observations by this. Otherwise, a few rejected drafts in a row would end
# drafting for the rest of the answer, since a head that does not draft is not observed.
HEAD_MEMORY = 0.95


@dataclass(frozen=True)
class Match:
    """Tokens, possibly none, that followed the end of a row's sequence where its last n-gram occurred before."""

    source: str = ""
    tokens: Sequence[int] = ()
    acceptance: float = 0.0


class NgramIndex:
    """Finds where the longest suffix of a sequence occurred before (prompt lookup, with several lengths)."""

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
        """Find the longest suffix of sequence + `drafted` that occurred earlier in the sequence.

        Returns the suffix's length and the position after its latest occurrence; (0, 0) if there is no such suffix.
        """
        end = [*self.tokens[-MAX_NGRAM:], *drafted]
        for length in range(min(MAX_NGRAM, len(self.tokens) + len(drafted)), 0, -1):
            position = self._next[length].get(tuple(end[-length:]))
            if position is not None:
                return length, position
        return 0, 0

    def continuation(self, position: int, num_tokens: int, drafted: Sequence[int] = ()) -> list[int]:
        """The `num_tokens` tokens of sequence + `drafted` from `position` on, repeated if there are fewer."""
        period = len(self.tokens) + len(drafted) - position
        text = self.tokens[position : position + num_tokens] + list(drafted)[:num_tokens]
        return [text[offset % period] for offset in range(num_tokens)]


@dataclass
class _Round:
    """The drafts of one round, while they are written."""

    rows: list[int]  # indices of the rows in the batch
    limits: list[int]  # maximum number of tokens that each row may draft
    drafts: list[Draft]
    costs: CostTable  # of a batch of this size
    ms_per_token: float  # expected cost of a new token; see `policy.worth_another_draft`
    survivals: list[float]  # for each row, the probability that its whole draft is accepted


class HybridDrafter:
    """Drafts from n-grams and exit heads; before each round the policy chooses a source, or no drafting.

    Args:
        prompts: The prompt of each row.
        costs_of: Returns the measured costs for a number of rows; the costs are kept between calls.
        head_priors: For each exit layer that drafts, how often its head agreed with the base model in calibration.
        engine: Runs the draft heads; `None` if there are no heads.
        learned: Acceptance rate of each source in earlier calls at this temperature; updated in place. The rates return
            to their priors over time, since otherwise a rejected source would never be tried again.
        memory: Answers of earlier calls, which draft where that is likelier to be accepted than the row's own n-grams.
            They are judged in each round, drafted or not.
    """

    def __init__(
        self,
        prompts: Iterable[Iterable[int]],
        costs_of: Callable[[int], CostTable],
        head_priors: dict[int, float],
        engine: DraftEngine | None = None,
        learned: dict[str, float] | None = None,
        memory: AnswerMemory | None = None,
    ) -> None:
        self.memory = memory if memory is not None else AnswerMemory(0)
        self._remembered: dict[int, Match] = {}  # what the memory offered each row in this round
        self.indexes = [NgramIndex(prompt) for prompt in prompts]
        self.costs_of, self.engine = costs_of, engine
        self.heads = sorted(head_priors) if engine is not None else []
        self.head_sources = {layer: head_source(layer) for layer in head_priors}
        priors = {NGRAM_SOURCES[length]: prior for length, prior in NGRAM_PRIORS.items()}
        priors |= dict.fromkeys(REMEMBERED_SOURCES.values(), REMEMBERED_PRIOR)
        priors |= {self.head_sources[layer]: prior for layer, prior in head_priors.items()}
        self.learned = learned if learned is not None else {}
        for source, prior in priors.items():
            before = self.learned.get(source, prior)
            self.learned[source] = before + PRIOR_RATE * (prior - before)
        self.acceptances = AcceptanceTable({source: self.learned[source] for source in priors})
        self._costs: CostTable | None = None  # of the last round's batch
        self._num_rows = self._num_tokens = 0  # of the last round

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft from the best source, continue from another if that pays; draft nothing if plain decoding is best."""
        for exit_layer in self.heads:
            self.acceptances.forget(self.head_sources[exit_layer], HEAD_MEMORY)
        limits, drafts = [min(limit, MAX_DRAFT) for limit in limits], [Draft() for _ in rows]
        self._remembered = {row: self._match_in_memory(row) for row in rows}
        costs = self._next_round(len(rows))
        matches = [_likelier(self._match_in_row(row), self._remembered[row]) for row in rows]
        choice = choose(self._options(limits, matches), costs)
        if choice.option is None:
            return drafts
        current = _Round(rows, limits, drafts, costs, choice.ms_per_token, [1.0] * len(rows))
        head = choice.option.exit_layer
        lengths = [min(choice.num_draft_tokens, limit) for limit in limits]
        is_unread = self.engine is not None and not self.engine.reads_drafts  # if so, one source writes the whole draft
        if head is not None and is_unread:
            self._draft_unread(head, lengths, drafts)
        elif head is not None:
            self._draft_with_head(current, head, lengths)
            self._continue_with_ngrams(current)
        else:
            self._draft_with_ngrams(current, matches, lengths)
            if not is_unread:
                self._continue_with_head(current)
        return drafts

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        """Update the n-grams and the acceptance of the sources."""
        self.indexes[row].extend(accepted.tokens)
        self._num_tokens += len(accepted.tokens)
        remembered = self._remembered.pop(row, Match())
        if remembered.source not in ("", *(node.source for node in draft.nodes)):
            tokens = remembered.tokens[: len(accepted.tokens)]
            self._learn(remembered.source, len(tokens), num_shared(tokens, accepted.tokens))
        for source, num_judged, num_accepted in draft.judged(accepted.path):
            self._learn(source, num_judged, num_accepted)

    def _next_round(self, num_rows: int) -> CostTable:
        """End the last round; return the costs of one over `num_rows` rows."""
        if self._costs is not None and self._num_tokens:
            self._costs.end_round(self._num_tokens / self._num_rows)
        self._costs, self._num_rows, self._num_tokens = self.costs_of(num_rows), num_rows, 0
        self._costs.begin_round()
        return self._costs

    def _learn(self, source: str, num_drafted: int, n_matches: int) -> None:
        self.acceptances.record(source, num_drafted, n_matches)
        found = self.acceptances.probability(source)
        self.learned[source] += LEARNING_RATE * (found - self.learned[source])

    def _options(self, limits: list[int], matches: list[Match]) -> list[Option]:
        options = []
        if any(match.tokens for match in matches):
            offers = [
                (match.acceptance, min(limit, len(match.tokens))) for limit, match in zip(limits, matches, strict=True)
            ]
            options.append(Option(NGRAM, tuple(offers)))
        for exit_layer in self.heads:
            acceptance = self.acceptances.probability(self.head_sources[exit_layer])
            options.append(
                Option(self.head_sources[exit_layer], tuple((acceptance, limit) for limit in limits), exit_layer)
            )
        return options

    def _match(self, row: int, drafted: Sequence[int]) -> Match:
        """The likeliest continuation of the row's sequence + `drafted`, by its own n-grams or remembered ones."""
        return _likelier(self._match_in_row(row, drafted), self._match_in_memory(row, drafted))

    def _match_in_row(self, row: int, drafted: Sequence[int] = ()) -> Match:
        length, position = self.indexes[row].match(drafted)
        if not length:
            return Match()
        tokens = self.indexes[row].continuation(position, MAX_DRAFT, drafted)
        return Match(NGRAM_SOURCES[length], tokens, self.acceptances.probability(NGRAM_SOURCES[length]))

    def _match_in_memory(self, row: int, drafted: Sequence[int] = ()) -> Match:
        end = [*self.indexes[row].tokens[-MATCH_LENGTHS[-1] :], *drafted]
        length, tokens = self.memory.find(end, MAX_DRAFT)
        if not length:
            return Match()
        return Match(source := REMEMBERED_SOURCES[length], tokens, self.acceptances.probability(source))

    def _draft_unread(self, exit_layer: int, lengths: list[int], drafts: list[Draft]) -> None:
        """Let a head draft tokens that the host does not read before they are verified."""
        if self.engine is None:
            return
        chains, _ = self.engine.draft(exit_layer, [[] for _ in drafts], max(lengths))
        for draft, tokens, length in zip(drafts, chains, lengths, strict=True):
            draft.add(tokens[:length], self.head_sources[exit_layer], exit_layer)

    def _draft_with_head(self, current: _Round, exit_layer: int, lengths: list[int]) -> None:
        """Add a head's tokens to the drafts, which have equal lengths, until another token is not expected to pay."""
        if self.engine is None:
            return
        before = drafted = [draft.tokens for draft in current.drafts]
        own = self.acceptances.probability(self.head_sources[exit_layer])
        for _ in range(max(lengths)):
            found, scores = self.engine.draft(exit_layer, drafted)
            current.survivals = [survival * score for survival, score in zip(current.survivals, scores, strict=True)]
            drafted = [[*tokens_before, *new] for tokens_before, new in zip(drafted, found, strict=True)]
            if not self._is_worth_more(current, own, len(drafted[0]), exit_layer):
                break
            matches = [self._match(row, tokens) for row, tokens in zip(current.rows, drafted, strict=True)]
            if all(match.acceptance >= own for match in matches):
                break  # n-grams continue from here: their tokens are at least as likely to be accepted, and free
        for draft, tokens, start, length in zip(current.drafts, drafted, before, lengths, strict=True):
            draft.add(tokens[len(start) :][:length], self.head_sources[exit_layer], exit_layer, probability=own)

    def _draft_with_ngrams(self, current: _Round, matches: list[Match], lengths: list[int]) -> None:
        """Add the continuations of n-grams to the drafts of the rows that have a match."""
        current.survivals = [0.0] * len(matches)
        for number, (match, length) in enumerate(zip(matches, lengths, strict=True)):
            if match.tokens:
                tokens = list(match.tokens[:length])
                current.drafts[number].add(tokens, match.source, probability=match.acceptance)
                current.survivals[number] = match.acceptance ** len(tokens)

    def _continue_with_ngrams(self, current: _Round) -> None:
        """Let n-grams continue where a head stopped, as far as the wider verify pass is worth it."""
        matches = [self._match(row, draft.tokens) for row, draft in zip(current.rows, current.drafts, strict=True)]
        room = [limit - len(draft.tokens) for limit, draft in zip(current.limits, current.drafts, strict=True)]
        offers = [(match.acceptance, min(most, len(match.tokens))) for match, most in zip(matches, room, strict=True)]
        drafted = max(len(draft.tokens) for draft in current.drafts)
        length = choose_continuation(offers, current.survivals, drafted, current.costs)
        self._draft_with_ngrams(current, matches, [min(length, most) for most in room])

    def _continue_with_head(self, current: _Round) -> None:
        """Let a head continue n-gram drafts of equal lengths, if one more token is expected to pay."""
        drafted = len(current.drafts[0].tokens)
        room = min(current.limits) - drafted
        if room <= 0 or any(len(draft.tokens) != drafted for draft in current.drafts):
            return
        for exit_layer in self.heads:
            if self.engine is not None and exit_layer == self.engine.head_layer:
                continue  # it would read hidden states of the n-gram's last token, which no pass has computed
            own = self.acceptances.probability(self.head_sources[exit_layer])
            if self._is_worth_more(current, own, drafted, exit_layer, catch_up=True):
                self._draft_with_head(current, exit_layer, [room] * len(current.rows))
                return

    def _is_worth_more(
        self, current: _Round, acceptance: float, drafted: int, exit_layer: int, catch_up: bool = False
    ) -> bool:
        costs, price = current.costs, current.ms_per_token
        return worth_another_draft(current.survivals, acceptance, drafted, exit_layer, costs, price, catch_up)


def _likelier(own: Match, remembered: Match) -> Match:
    return remembered if remembered.acceptance > own.acceptance else own


class NoDrafter:
    """Drafts nothing, and lets the engine know: for passes of which each gives one token."""

    def __init__(self, _attachment: Any, _call: Any, engine: DraftEngine) -> None:
        self.engine = engine

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft nothing."""
        self.engine.costs_of(len(rows)).begin_round(is_off=True)
        return [Draft() for _ in rows]

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        """Learn nothing."""
