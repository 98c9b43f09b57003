"""Choose the useful exit layers, and an exit threshold whose disagreement stays below a tolerance.

The threshold is chosen by Learn then Test (Angelopoulos et al., arXiv 2110.01052) with fixed-sequence testing: the
thresholds of a grid fixed in advance are tested in descending order, each at the full level, until one fails. Intervals
are percentile bootstraps over documents or prompts, since tokens of one document are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..base_model.structure import DecoderStructure
from ..kernels.reference import exit_mask
from ..routers.config import NEVER_EXIT
from ..speculation.policy import DRAFT_LENGTHS, MIN_GAIN, PRIOR_SLOPE, draft_cost, expected_tokens

RESAMPLES = 1000
RESAMPLED_AT_ONCE = 2**20  # maximum number of items drawn at once, over several resamples: 8 MB per column
ROUNDING = 1e-9  # relative difference that the order of summation can make
Sums = Mapping[str, Tensor]
GRID = (0.999, 0.998, 0.995, *(round(0.99 - 0.01 * step, 2) for step in range(50)))  # 0.99, 0.98 ... 0.50
MIN_EXIT_RATE = 0.01  # share of tokens; a layer with fewer exits is kept only if it drafts well
# Scenarios of machine and text. Costs are in full-depth passes over one token.
SLOPES = (0.0, 0.02, 0.05, 0.1, 0.2)  # cost of one more token in a verify pass
OVERHEADS = (0.0, 0.03, 0.1)  # cost of a draft step beyond its layers and head
EASE = (1.0, 0.5, 0.25)  # acceptance = agreement ** ease, for text easier than the calibration's


def resampled_sums(values: Tensor) -> Tensor:
    """Sums (RESAMPLES, columns) over resamples of (items, columns); each draws `items` rows with replacement."""
    generator = torch.Generator().manual_seed(0)
    count = len(values)
    at_once = max(1, RESAMPLED_AT_ONCE // count)
    parts = [min(at_once, RESAMPLES - start) for start in range(0, RESAMPLES, at_once)]
    return torch.cat([values[torch.randint(count, (part, count), generator=generator)].sum(dim=1) for part in parts])


class Bootstrap:
    """Percentile bootstrap of figures that are functions of sums over items (documents, prompts).

    `columns` are summands (items,) by name. All figures use the same resamples, so differences of columns are paired.
    """

    def __init__(self, columns: Mapping[str, Tensor], confidence: float) -> None:
        names, values = list(columns), torch.stack([column.double() for column in columns.values()], dim=1)
        self.count = len(values)
        self.miss = (1 - confidence) / 2
        self._totals = dict(zip(names, values.sum(dim=0), strict=True))
        self._resampled = dict(zip(names, resampled_sums(values).unbind(dim=1), strict=True))

    def figure(self, statistic: Callable[[Sums], Tensor], limits: tuple[float, float] | None = None) -> dict[str, Any]:
        """Compute a figure and its interval.

        `statistic` maps the sums of all columns to the figure, elementwise over resamples. If all resamples are equal,
        the bootstrap interval has no width. A figure without `limits`, such as a perplexity, then has no interval. A
        figure with `limits` (a share or difference of shares, which one of n items changes by at most 1/n) then gets
        the width of the Clopper-Pearson interval of 0 successes in n trials on both sides.
        """
        value, resampled = float(statistic(self._totals)), statistic(self._resampled)
        lower, upper = resampled.quantile(torch.tensor([self.miss, 1 - self.miss], dtype=torch.float64)).tolist()
        if torch.allclose(resampled, resampled[:1], rtol=ROUNDING, atol=ROUNDING):
            if limits is None:
                return {"value": value, "interval": None}
            slack = 1 - self.miss ** (1 / self.count)
            lower, upper = max(limits[0], value - slack), min(limits[1], value + slack)
        return {"value": value, "interval": [lower, upper]}


def exit_indices(scores: Tensor, exit_threshold: float) -> Tensor:
    """The exit rule of `early_exit`: index of the first exit layer whose score reaches the threshold, else E.

    `scores` are (..., E), for E exit layers in ascending order; the indices are (...), int64.
    """
    reached = exit_mask(scores, exit_threshold)
    return torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), scores.shape[-1])


def exit_depths(indices: Tensor, exit_layers: Sequence[int], num_layers: int) -> Tensor:
    """Number of executed layers, int64, for each index from `exit_indices`."""
    return torch.tensor([*exit_layers, num_layers], device=indices.device)[indices]


@dataclass(frozen=True)
class Decisions:
    """Exit scores and head agreement at N positions of one split's documents."""

    exit_layers: Sequence[int]  # E of them, ascending
    num_layers: int  # of the base model
    scores: Tensor  # (N, E) float32 exit scores
    agrees: Tensor  # (N, E) bool, whether the exit head's top token is the full model's
    document_ids: Tensor  # (N,) document of each position

    def only(self, exit_layers: Sequence[int]) -> Decisions:
        """The same positions with only these exit layers."""
        columns = [list(self.exit_layers).index(layer) for layer in exit_layers]
        scores, agrees = self.scores[:, columns], self.agrees[:, columns]
        return replace(self, exit_layers=list(exit_layers), scores=scores, agrees=agrees)

    def disagreement_per_document(self, threshold: float) -> Tensor:
        """Share of each document's positions whose token differs from the full model's, (documents,) float64."""
        index = exit_indices(self.scores, threshold)
        right = functional.pad(self.agrees, (0, 1), value=True).gather(1, index[:, None])[:, 0]
        _, document = self.document_ids.unique(return_inverse=True)
        return torch.bincount(document, weights=(~right).double()) / torch.bincount(document)

    def depth_fraction(self, threshold: float) -> float:
        """Mean layers executed per token, as a share of the model's layers."""
        depths = exit_depths(exit_indices(self.scores, threshold), self.exit_layers, self.num_layers)
        return float(depths.double().mean()) / self.num_layers

    def exit_rates(self, threshold: float) -> dict[int, float]:
        """Share of the positions that exit at each exit layer."""
        index = exit_indices(self.scores, threshold)
        return {layer: float((index == i).double().mean()) for i, layer in enumerate(self.exit_layers)}


@dataclass(frozen=True)
class ThresholdRow:
    """One threshold of the grid."""

    exit_threshold: float
    disagreement: float  # mean over documents
    depth_fraction: float  # mean layers executed per token, as a share of the model's layers
    p_value: float  # of the hypothesis that the true disagreement exceeds the tolerance
    certified: bool  # whether this and all higher thresholds passed the test


@dataclass(frozen=True)
class ThresholdChoice:
    """The chosen threshold (`NEVER_EXIT` if no threshold was certified), and a table of all thresholds."""

    tolerance: float
    confidence: float
    chosen: float
    table: list[ThresholdRow]


def choose_threshold(
    decisions: Decisions, *, tolerance: float, confidence: float, grid: Sequence[float] = GRID
) -> ThresholdChoice:
    """Find the lowest threshold whose disagreement is below `tolerance` with probability `confidence`.

    Documents, which neither heads nor routers have seen, are the exchangeable unit. The grid is descending and fixed in
    advance; thresholds below the first failure stay in the table as uncertified rows.
    """
    table: list[ThresholdRow] = []
    certified = True
    for threshold in grid:
        losses = decisions.disagreement_per_document(threshold)
        mean = float(losses.mean())
        p_value = hoeffding_bentkus_p_value(mean, len(losses), tolerance)
        certified = certified and p_value <= 1 - confidence
        table.append(ThresholdRow(threshold, mean, decisions.depth_fraction(threshold), p_value, certified))
    chosen = min((row.exit_threshold for row in table if row.certified), default=NEVER_EXIT)
    return ThresholdChoice(tolerance, confidence, chosen, table)


def hoeffding_bentkus_p_value(mean_loss: float, count: int, tolerance: float) -> float:
    """P-value of "the expected loss exceeds `tolerance`", for losses in [0, 1] (Bates et al., arXiv 2101.02703).

    It is the smaller of Hoeffding's and Bentkus' bounds for the mean of `count` exchangeable losses, at most 1.
    """
    below = min(mean_loss, tolerance)
    hoeffding = math.exp(-count * _bernoulli_divergence(below, tolerance))
    bentkus = math.e * _binomial_cdf(math.ceil(count * mean_loss - 1e-9), count, tolerance)
    return min(1.0, hoeffding, bentkus)


def clopper_pearson(successes: int, count: int, confidence: float) -> tuple[float, float]:
    """Exact confidence interval of a probability (Clopper and Pearson, Biometrika 26, 1934)."""
    miss = (1 - confidence) / 2
    lower, upper = 0.0, 1.0
    if successes > 0:
        lower = _root(lambda probability: 1 - _binomial_cdf(successes - 1, count, probability) >= miss)
    if successes < count:
        upper = _root(lambda probability: _binomial_cdf(successes, count, probability) <= miss)
    return lower, upper


def _root(reached: Callable[[float], bool]) -> float:
    """The point in (0, 1) from which a monotone condition holds, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _bernoulli_divergence(p: float, q: float) -> float:
    """KL divergence of two Bernoulli distributions."""
    divergence = (1 - p) * math.log((1 - p) / (1 - q))
    return divergence + (p * math.log(p / q) if p > 0 else 0.0)


def _binomial_cdf(successes: int, count: int, probability: float) -> float:
    """Probability of at most `successes` in `count` trials."""
    if successes >= count:
        return 1.0
    log_terms = [
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(probability)
        + (count - k) * math.log1p(-probability)
        for k in range(successes + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, log_terms)))


def mean_interval(losses: Tensor, confidence: float) -> tuple[float, float]:
    """Bootstrap interval of the mean of losses in [0, 1], (documents,) float64."""
    bootstrap = Bootstrap({"loss": losses, "documents": torch.ones_like(losses)}, confidence)
    lower, upper = bootstrap.figure(lambda sums: sums["loss"] / sums["documents"], limits=(0.0, 1.0))["interval"]
    return lower, upper


class Candidate(NamedTuple):
    """Figures of a candidate exit layer."""

    agreement: float  # share of positions at which the layer's head has the full model's top token
    draft_cost: float  # of one draft step, in full-depth passes over one token
    exit_rate: float  # share of positions that exit at this layer


def candidates_on(
    tune: Decisions, structure: DecoderStructure, draft_vocab_size: int, tolerance: float
) -> dict[int, Candidate]:
    """Figures of each exit layer on the tune split; for exit rates see `exit_rates_within`."""
    agreements = tune.agrees.double().mean(dim=0).tolist()
    rates = exit_rates_within(tune, tolerance)
    vocab_share = draft_vocab_size / structure.vocab_size
    return {
        layer: Candidate(agreement, draft_cost(layer, structure.num_layers, structure.head_share, vocab_share), rate)
        for (layer, rate), agreement in zip(rates.items(), agreements, strict=True)
    }


def exit_rates_within(decisions: Decisions, tolerance: float) -> dict[int, float]:
    """Exit rates by layer at the lowest threshold whose measured disagreement is within `tolerance`.

    `decisions` are on the tune split, because selecting layers on the certify split would void the guarantee.
    """
    lowest = NEVER_EXIT
    for threshold in GRID:
        if float(decisions.disagreement_per_document(threshold).mean()) > tolerance:
            break
        lowest = threshold
    return decisions.exit_rates(lowest)


def useful_exit_layers(candidates: Mapping[int, Candidate]) -> list[int]:
    """Keep the layers that are useful on some machine and some text.

    A layer is kept if at least `MIN_EXIT_RATE` of the tokens exit there, or if in some scenario it is the fastest layer
    to draft from and at least `MIN_GAIN` times as fast as plain decoding. If no layer qualifies, the fastest is kept.
    """
    kept = {layer for layer, candidate in candidates.items() if candidate.exit_rate >= MIN_EXIT_RATE}
    fastest, best_gain = min(candidates), 0.0
    for slope, overhead, ease in product(SLOPES, OVERHEADS, EASE):
        gains = {layer: _gain(candidate, slope, overhead, ease) for layer, candidate in candidates.items()}
        best = max(sorted(gains), key=gains.__getitem__)
        if gains[best] >= MIN_GAIN:
            kept.add(best)
        if gains[best] > best_gain:
            fastest, best_gain = best, gains[best]
    return sorted(kept or {fastest})


def expected_gain(agreement: float, draft_cost: float) -> float:
    """Speed-up over plain decoding that the policy expects of a draft head, before it has measured a pass.

    `agreement` is how often the head's first draft is right; `draft_cost` is that of a step, in full-depth passes.
    """
    return _gain(Candidate(agreement, draft_cost, exit_rate=0.0), PRIOR_SLOPE, OVERHEADS[1], ease=1.0)


def _gain(candidate: Candidate, slope: float, overhead: float, ease: float) -> float:
    """Speed-up over plain decoding at the best draft length."""
    acceptance = candidate.agreement**ease
    step = candidate.draft_cost + overhead
    return max(expected_tokens(acceptance, length) / (step * length + 1 + slope * length) for length in DRAFT_LENGTHS)
