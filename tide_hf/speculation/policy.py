"""What to draft next: costs and acceptances in, a decision out. Knows no model and no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .costs import CostTable

MAX_DRAFT = 15
DRAFT_LENGTHS = (1, 2, 3, 5, 7, 11, MAX_DRAFT)  # verify widths one more than these, to learn few costs well
MIN_GAIN = 1.05  # a draft must promise this much over plain decoding, since the figures are noisy


class AcceptanceTable:
    """Running probability that the next draft token of a source is accepted, forgetting slowly.

    Args:
        priors: Probability per source before anything was seen.
        weight: How many observations a prior counts for, at any time.
        decay: What earlier observations keep of their weight at each new one.
    """

    def __init__(self, priors: dict[str, float], weight: float = 4.0, decay: float = 0.97) -> None:
        self._priors = priors
        self._counts = {source: [0.0, 0.0] for source in priors}
        self._weight, self._decay = weight, decay

    def record(self, source: str, num_drafted: int, n_matches: int) -> None:
        """Add one verified draft. Tokens after the first rejected one say nothing."""
        trials = min(num_drafted, n_matches + 1)
        self.forget(source, self._decay**trials)
        counts = self._counts[source]
        counts[0] += n_matches
        counts[1] += trials

    def forget(self, source: str, keep: float) -> None:
        """Let what was observed of a source keep only a share of its weight."""
        self._counts[source] = [keep * count for count in self._counts[source]]

    def probability(self, source: str) -> float:
        """Probability that the next draft token of `source` is accepted."""
        hits, trials = self._counts[source]
        return (self._priors[source] * self._weight + hits) / (self._weight + trials)


@dataclass(frozen=True)
class Option:
    """A source that could draft in this round.

    Attributes:
        source: Its name.
        rows: For each row of the batch, the probability that a draft token is accepted and the most tokens on offer.
        exit_layer: The layer that drafts, 0 where no layer runs.
    """

    source: str
    rows: tuple[tuple[float, int], ...]
    exit_layer: int = 0

    def expected_tokens(self, num_drafts: int) -> float:
        """Expected new tokens of a round in which each row drafts `num_drafts` tokens or as many as it can."""
        return sum(expected_tokens(acceptance, min(num_drafts, limit)) for acceptance, limit in self.rows)


@dataclass(frozen=True)
class Choice:
    """What to do in one round.

    Attributes:
        option: The source; `None` for plain decoding.
        num_assistant_tokens: Draft tokens per row to ask for.
        ms_per_token: What a new token is then expected to cost.
    """

    option: Option | None = None
    num_assistant_tokens: int = 0
    ms_per_token: float = math.inf


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Expected tokens of a round: 1 + a + a^2 + ... + a^k, the bonus token included (Leviathan et al. 2022)."""
    if acceptance >= 1.0:
        return float(num_drafts + 1)
    return (1.0 - acceptance ** (num_drafts + 1)) / (1.0 - acceptance)


def choose(options: list[Option], costs: CostTable) -> Choice:
    """Pick the source and draft length with the best expected tokens per millisecond.

    Plain decoding is always an option, and the choice until it has been measured.

    Args:
        options: The sources on offer.
        costs: Measured costs of a batch of this size.

    Returns:
        The choice.
    """
    best = Choice()
    if not costs.ready or not options:
        return best
    best_rate = MIN_GAIN * len(options[0].rows) / costs.verify(1)
    for option in options:
        most = max(limit for _, limit in option.rows)
        per_draft = costs.draft(option.exit_layer) if option.exit_layer else 0.0
        for length in {min(length, most) for length in DRAFT_LENGTHS} - {0}:
            rate = option.expected_tokens(length) / (per_draft * length + costs.verify(length + 1))
            if rate > best_rate:
                best, best_rate = Choice(option, length, 1.0 / rate), rate
    return best


def worth_another_draft(
    survivals: list[float],
    acceptance: float,
    drafted: int,
    exit_layer: int,
    costs: CostTable,
    ms_per_token: float,
    catch_up: bool = False,
) -> bool:
    """Whether one more draft token for each row pays for itself, given how sure the ones so far are.

    Args:
        survivals: For each row the probability that all tokens drafted so far are accepted (the product of their exit
            scores).
        acceptance: The probability that the next is, where these are.
        drafted: Tokens drafted so far.
        exit_layer: The layer that drafts.
        costs: Measured costs of a batch of this size.
        ms_per_token: What a token costs in rounds like this one: so much time may be spent on one more, and no more,
            since the rounds to come give tokens at that price.
        catch_up: Whether that layer has yet to see the tokens drafted so far, which another source wrote.
    """
    draft = costs.draft(exit_layer)
    if catch_up:
        draft *= costs.verify(drafted + 1) / costs.verify(1)
    extra = draft + costs.verify(drafted + 2) - costs.verify(drafted + 1)
    return sum(survivals) * acceptance * ms_per_token > extra


def choose_continuation(
    offers: tuple[tuple[float, int], ...], survivals: list[float], drafted: int, costs: CostTable
) -> int:
    """How many tokens that cost nothing to draft are worth their share of a wider verify pass.

    Args:
        offers: For each row the probability that such a token is accepted and the most tokens on offer.
        survivals: For each row the probability that all tokens drafted so far are accepted.
        drafted: Tokens drafted so far, in the longest row.
        costs: Measured costs of a batch of this size.

    Returns:
        Tokens per row, 0 where none pays.
    """
    best, best_gain = 0, 0.0
    most = max(limit for _, limit in offers)
    for length in range(1, min(most, MAX_DRAFT - drafted) + 1):
        tokens = sum(
            survival * (expected_tokens(acceptance, min(length, limit)) - 1.0)
            for survival, (acceptance, limit) in zip(survivals, offers, strict=True)
        )
        extra = costs.verify(drafted + length + 1) - costs.verify(drafted + 1)
        gain = tokens * costs.verify(1) - extra * len(offers)
        if gain > best_gain:
            best, best_gain = length, gain
    return best
