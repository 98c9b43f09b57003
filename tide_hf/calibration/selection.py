"""Which exit layers are worth keeping: those that could draft best, and those at which tokens leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch

from ..base_model.structure import DecoderStructure
from ..speculation.policy import DRAFT_LENGTHS, MIN_GAIN, expected_tokens
from .threshold import GRID, Decisions

MIN_EXIT_RATE = 0.01  # a layer at which fewer tokens leave is not worth its weights
SLOPES = (0.0, 0.02, 0.05, 0.1, 0.2)  # of a pass, that one more token in a verify pass may cost
OVERHEADS = (0.0, 0.03, 0.1)  # of a pass, that a draft step may cost beyond its layers and head
EASE = (1.0, 0.5, 0.25)  # acceptance is agreement to this power: text may be easier than the calibration's on the whole


@dataclass(frozen=True)
class Candidate:
    """What is known of an exit layer.

    Attributes:
        agreement: Share of positions at which its head chooses the full model's token, in [0, 1].
        draft_cost: Of one draft step, in full-depth passes over one token.
        exit_rate: Share of positions that would leave there.
    """

    agreement: float
    draft_cost: float
    exit_rate: float


def proportional_cost(exit_layer: int, num_layers: int, head_share: float, vocab_share: float = 1.0) -> float:
    """Cost of a draft step, in full-depth passes over one token, if time goes as the weights that are read.

    Args:
        exit_layer: Layers that it runs.
        num_layers: Of the base model.
        head_share: Share of the output head in a pass's weights.
        vocab_share: Share of the head that drafting reads.
    """
    return (1 - head_share) * exit_layer / num_layers + head_share * vocab_share


def useful_exit_layers(candidates: Mapping[int, Candidate]) -> list[int]:
    """Keep the layers that can be of use on some machine and some text.

    A layer is kept if at least `MIN_EXIT_RATE` of the tokens leave there, or if it promises the most tokens per second
    of all layers, and `MIN_GAIN` over plain decoding, for any of the `SLOPES`, `OVERHEADS` and `EASE`. Where none is
    kept by that rule, the one that comes nearest to plain decoding is.

    Args:
        candidates: By exit layer; at least one.

    Returns:
        Exit layers, ascending.
    """
    kept = {layer for layer, candidate in candidates.items() if candidate.exit_rate >= MIN_EXIT_RATE}
    nearest, nearest_gain = min(candidates), 0.0
    for slope, overhead, ease in product(SLOPES, OVERHEADS, EASE):
        gains = {layer: _gain(candidate, slope, overhead, ease) for layer, candidate in candidates.items()}
        best = max(sorted(gains), key=gains.__getitem__)
        if gains[best] >= MIN_GAIN:
            kept.add(best)
        if gains[best] > nearest_gain:
            nearest, nearest_gain = best, gains[best]
    return sorted(kept or {nearest})


def exit_rates_within(decisions: Decisions, tolerance: float) -> dict[int, float]:
    """Where tokens leave at the lowest threshold whose measured disagreement is within `tolerance`.

    It is measured on the tune split: to choose layers by what the certifying documents show would void what is
    certified on them.

    Args:
        decisions: On the tune split.
        tolerance: As in `calibrate`.

    Returns:
        Share of the positions that leave, by exit layer.
    """
    lowest = None
    for threshold in GRID:
        if float(decisions.disagreement_per_document(threshold).mean()) > tolerance:
            break
        lowest = threshold
    return decisions.exit_rates(lowest) if lowest is not None else dict.fromkeys(decisions.exit_layers, 0.0)


def agreements(decisions: Decisions) -> dict[int, float]:
    """Share of the positions at which each exit layer's head chooses the full model's token."""
    means = decisions.agrees.to(torch.float64).mean(dim=0).tolist()
    return dict(zip(decisions.exit_layers, means, strict=True))


def candidates_on(
    tune: Decisions, structure: DecoderStructure, draft_vocab_size: int, tolerance: float
) -> dict[int, Candidate]:
    """What is known of each exit layer, by what it did on the tune split.

    Args:
        tune: On the tune split.
        structure: Of the base model.
        draft_vocab_size: Tokens that heads draft from.
        tolerance: As in `calibrate`.
    """
    rates, agreement = exit_rates_within(tune, tolerance), agreements(tune)
    vocab_share = draft_vocab_size / structure.vocab_size
    costs = {
        layer: proportional_cost(layer, structure.num_layers, structure.head_share, vocab_share)
        for layer in tune.exit_layers
    }
    return {layer: Candidate(agreement[layer], cost, rates[layer]) for layer, cost in costs.items()}


def _gain(candidate: Candidate, slope: float, overhead: float, ease: float) -> float:
    """Best tokens per second over plain decoding's, over all lengths of a draft."""
    acceptance = candidate.agreement**ease
    step = candidate.draft_cost + overhead
    return max(expected_tokens(acceptance, length) / (step * length + 1 + slope * length) for length in DRAFT_LENGTHS)
