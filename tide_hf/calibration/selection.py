"""Selection of exit layers: those that tokens exit at, and those that draft best."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from ..base_model.structure import DecoderStructure
from ..routers.config import NEVER_EXIT
from ..speculation.policy import DRAFT_LENGTHS, MIN_GAIN, expected_tokens
from .threshold import GRID, Decisions

MIN_EXIT_RATE = 0.01  # below this share of tokens a layer is not worth its weights
# Scenarios of machine and text. Costs are in full-depth passes over one token.
SLOPES = (0.0, 0.02, 0.05, 0.1, 0.2)  # cost of one more token in a verify pass
OVERHEADS = (0.0, 0.03, 0.1)  # cost of a draft step beyond its layers and head
EASE = (1.0, 0.5, 0.25)  # acceptance = agreement ** ease, for text easier than the calibration's


class Candidate(NamedTuple):
    """Figures of a candidate exit layer.

    Attributes:
        agreement: Share of positions at which its head has the full model's top token, in [0, 1].
        draft_cost: Cost of one draft step, in full-depth passes over one token.
        exit_rate: Share of positions that exit there.
    """

    agreement: float
    draft_cost: float
    exit_rate: float


def candidates_on(
    tune: Decisions, structure: DecoderStructure, draft_vocab_size: int, tolerance: float
) -> dict[int, Candidate]:
    """Figures of each exit layer on the tune split, for the `tolerance` of `calibrate`."""
    agreements = tune.agrees.double().mean(dim=0).tolist()
    rates = exit_rates_within(tune, tolerance)
    vocab_share = draft_vocab_size / structure.vocab_size
    return {
        layer: Candidate(agreement, draft_cost(layer, structure.num_layers, structure.head_share, vocab_share), rate)
        for (layer, rate), agreement in zip(rates.items(), agreements, strict=True)
    }


def draft_cost(exit_layer: int, num_layers: int, head_share: float, vocab_share: float) -> float:
    """Cost of a draft step in full-depth passes over one token, proportional to the weights read.

    Args:
        exit_layer: Layers executed.
        num_layers: Layers of the base model.
        head_share: Share of the output head in the weights of a full pass.
        vocab_share: Share of the output head's rows in the draft vocabulary.
    """
    return (1 - head_share) * exit_layer / num_layers + head_share * vocab_share


def exit_rates_within(decisions: Decisions, tolerance: float) -> dict[int, float]:
    """Exit rates by layer at the lowest threshold whose measured disagreement is within `tolerance`.

    Decisions are those on the tune split, because selecting layers on the certify split would void the guarantee.
    """
    lowest = NEVER_EXIT
    for threshold in GRID:
        if float(decisions.disagreement_per_document(threshold).mean()) > tolerance:
            break
        lowest = threshold
    return decisions.exit_rates(lowest)


def useful_exit_layers(candidates: Mapping[int, Candidate]) -> list[int]:
    """Keep the layers that are useful on some machine and some text.

    A layer is kept if at least `MIN_EXIT_RATE` of the tokens exit there, or if in any scenario it gives the most tokens
    per second of all layers and `MIN_GAIN` over plain decoding. If no layer passes, the fastest one is kept.
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


def _gain(candidate: Candidate, slope: float, overhead: float, ease: float) -> float:
    """Speed-up over plain decoding at the best draft length."""
    acceptance = candidate.agreement**ease
    step = candidate.draft_cost + overhead
    return max(expected_tokens(acceptance, length) / (step * length + 1 + slope * length) for length in DRAFT_LENGTHS)
