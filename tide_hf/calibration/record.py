"""The calibration record, which is saved in the routers' config, and its tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor, nn

from ..base_model.structure import DecoderStructure
from ..common.version import __version__
from ..hub.provenance import machine
from ..routers.routers import TIDERouters
from ..routers.tables import describe_threshold, rich_table, tables_of
from .documents import Document, num_positions
from .router_training import area_under_curve, expected_calibration_error
from .threshold import Decisions, ThresholdChoice, choose_threshold, mean_interval

PRECISIONS = (0.99, 0.98, 0.95, 0.90)
TOLERANCES = (0.005, 0.01, 0.02, 0.05, 0.10)
RELIABILITY_BINS = 10
DIGITS = 5


def calibration_record(
    decisions: Decisions,
    choice: ThresholdChoice,
    documents: Sequence[Document],
    splits: dict[str, list[Document]],
    routers: TIDERouters,
    structure: DecoderStructure,
) -> dict[str, Any]:
    """The measurements of a calibration, ready for JSON."""
    sizes = layer_sizes(routers, structure)
    return {
        "exit_layers": {layer: row | sizes[layer] for layer, row in layer_figures(decisions, choice.chosen).items()},
        "threshold": asdict(choice),
        "tolerances": tolerance_rows(decisions, choice.confidence),
        "num_documents": len(documents),
        "num_tokens": num_positions(documents),
        "splits": {name: {"documents": len(part), "tokens": num_positions(part)} for name, part in splits.items()},
        "versions": {"tide_hf": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "machine": machine(routers.device),
    }


def print_report(record: dict[str, Any], num_layers: int) -> None:
    """Print the figures per exit layer and the chosen threshold."""
    console = Console(stderr=True)
    for title, table, note in tables_of(record, num_layers):
        console.print(rich_table(title, table))
        console.print(note, highlight=False)
        console.print()
    console.print(describe_threshold(record["threshold"]))


def layer_figures(decisions: Decisions, threshold: float) -> dict[str, dict[str, Any]]:
    """Figures of each exit layer on its own, and its exit rate at `threshold` with all exit layers in use.

    Routers are judged by agreement, whatever labels they were trained on.
    """
    rates = decisions.exit_rates(threshold)
    figures = {}
    for index, layer in enumerate(decisions.exit_layers):
        scores, agrees = decisions.scores[:, index], decisions.agrees[:, index]
        figures[str(layer)] = {
            "agreement": float(agrees.double().mean()),
            "router_auc": area_under_curve(scores, agrees),
            "expected_calibration_error": expected_calibration_error(scores, agrees),
            "coverage": {f"{p:.2f}": round(coverage_at(scores, agrees, p), DIGITS) for p in PRECISIONS},
            "exit_rate": rates[layer],
            "reliability": reliability_bins(scores, agrees),
        }
    return figures


def coverage_at(scores: Tensor, agrees: Tensor, precision: float) -> float:
    """Largest share of positions that a threshold on `scores` lets exit while at least `precision` of them agree.

    The threshold is chosen on the same positions (N,) that are measured, so new text does a little worse.
    """
    ordered, order = scores.sort(descending=True)
    right = agrees[order].double().cumsum(0)
    counts = torch.arange(1, len(scores) + 1)
    last_of_score = torch.ones_like(agrees)
    last_of_score[:-1] = ordered[1:] != ordered[:-1]  # a threshold takes all positions of one score, or none
    reached = counts[last_of_score & (right >= precision * counts - 1e-9)]
    return int(reached[-1]) / len(scores) if len(reached) else 0.0


def reliability_bins(scores: Tensor, agrees: Tensor, num_bins: int = RELIABILITY_BINS) -> list[list[float]]:
    """Mean score, share of agreement and number of positions of each non-empty bin; bins have equal width."""
    bins = (scores * num_bins).long().clamp(0, num_bins - 1)
    counts = torch.bincount(bins, minlength=num_bins)
    sums = [torch.bincount(bins, weights=values.double(), minlength=num_bins) for values in (scores, agrees)]
    rows = zip(*((part / counts).tolist() for part in sums), counts.tolist(), strict=True)
    return [[round(score, DIGITS), round(share, DIGITS), count] for score, share, count in rows if count]


def layer_sizes(routers: TIDERouters, structure: DecoderStructure) -> dict[str, dict[str, Any]]:
    """For each exit layer, the exit head's parameters, and the share of a full pass's weights that an exit reads.

    An exit reads the layers up to it, its router and exit head, the final norm and the output head (only the draft
    vocabulary's rows, if there is one). All experts of a mixture count, though a token uses few of them.
    """
    after = sum(map(_num_weights, (structure.norm, structure.projection)))
    output_head = _num_weights(structure.head)
    layers = [_num_weights(layer) for layer in structure.layers]
    whole = sum(layers) + after + output_head
    drafted = output_head * (routers.config.draft_vocab_size or structure.vocab_size) / structure.vocab_size
    sizes = {}
    for layer in routers.exit_layers:
        head = _num_weights(routers[layer].head)
        read = sum(layers[:layer]) + _num_weights(routers[layer].router) + head + after + drafted
        sizes[str(layer)] = {
            "head_parameters": head,
            "head_mb": round(2e-6 * head, 3),
            "cost": round(read / whole, DIGITS),
        }
    return sizes


def tolerance_rows(decisions: Decisions, confidence: float) -> list[dict[str, Any]]:
    """Threshold and figures for each of `TOLERANCES`, certified separately; `None` if no threshold is certified."""
    rows = []
    for tolerance in TOLERANCES:
        choice = choose_threshold(decisions, tolerance=tolerance, confidence=confidence)
        chosen = next((row for row in choice.table if row.exit_threshold == choice.chosen), None)
        row: dict[str, Any] = {"tolerance": tolerance, "exit_threshold": None, "disagreement": None, "interval": None}
        row["depth_fraction"] = 1.0
        if chosen is not None:
            row |= {name: round(getattr(chosen, name), DIGITS) for name in ("disagreement", "depth_fraction")}
            losses = decisions.disagreement_per_document(chosen.exit_threshold)
            row["exit_threshold"] = chosen.exit_threshold
            row["interval"] = [round(end, DIGITS) for end in mean_interval(losses, confidence)]
        rows.append(row)
    return rows


def _num_weights(module: nn.Module | None) -> int:
    return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0
