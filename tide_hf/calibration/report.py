"""What people see of a calibration: progress bars, the record that goes into the config, and the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..configuration_tide import NEVER_EXIT
from .data import Document, Splits, num_positions
from .threshold import Decisions, ThresholdChoice
from .training import area_under_curve, expected_calibration_error

Item = TypeVar("Item")


class Steps:
    """One progress bar a step.

    Args:
        enabled: Whether to show anything.
    """

    def __init__(self, enabled: bool) -> None:
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=Console(stderr=True), disable=not enabled)

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, description: str, total: int) -> Callable[[int], None]:
        """Start a step of `total` units; the result is to be called with the number of units done."""
        task = self._progress.add_task(description, total=total)
        return lambda count: self._progress.update(task, advance=count)

    def track(self, description: str, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Yield `items` and move the bar after each."""
        advance = self.begin(description, total)
        for item in items:
            yield item
            advance(1)


def layer_figures(decisions: Decisions, threshold: float) -> dict[str, dict[str, Any]]:
    """Measure each exit layer on the certifying documents, ready for JSON."""
    rates = decisions.exit_rates(threshold)
    figures = {}
    for index, layer in enumerate(decisions.exit_layers):
        scores, agrees = decisions.scores[:, index], decisions.agrees[:, index]
        figures[str(layer)] = {
            "agreement": float(agrees.double().mean()),
            "router_auc": area_under_curve(scores, agrees),
            "expected_calibration_error": expected_calibration_error(scores, agrees),
            "exit_rate": rates[layer],
        }
    return figures


def calibration_record(
    decisions: Decisions, choice: ThresholdChoice, documents: Sequence[Document], splits: Splits
) -> dict[str, Any]:
    """What a calibration measured, ready for JSON."""
    layers = {"exit_layers": layer_figures(decisions, choice.chosen), "threshold": choice.to_dict()}
    return layers | data_figures(documents, splits) | {"versions": versions()}


def data_figures(documents: Sequence[Document], splits: Splits) -> dict[str, Any]:
    """Count documents and the positions that calibration looked at."""
    parts = {name: getattr(splits, name) for name in ("fit", "tune", "certify")}
    return {
        "num_documents": len(documents),
        "num_tokens": num_positions(documents),
        "splits": {name: {"documents": len(part), "tokens": num_positions(part)} for name, part in parts.items()},
    }


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    own = sys.modules[__package__.partition(".")[0]].__version__
    return {"tide_hf": own, "torch": torch.__version__, "transformers": transformers.__version__}


def print_report(record: dict[str, Any], num_layers: int) -> None:
    """Print the figures per exit layer and what the threshold came to."""
    table = Table(title="Calibrated exit layers (on text that nothing was fitted to)")
    for heading in ("exit layer", "agreement", "router AUC", "calibration error", "tokens that leave"):
        table.add_column(heading, justify="right")
    for layer, row in sorted(record["exit_layers"].items(), key=lambda item: int(item[0])):
        share = f"{row['agreement']:.1%}", f"{row['router_auc']:.3f}"
        table.add_row(
            f"{layer} of {num_layers}", *share, f"{row['expected_calibration_error']:.3f}", f"{row['exit_rate']:.1%}"
        )
    console = Console(stderr=True)
    console.print(table)
    console.print(describe_threshold(record["threshold"]))


def describe_threshold(threshold: dict[str, Any]) -> str:
    """One sentence on what was chosen."""
    bound = f"disagreement below {threshold['tolerance']:.1%} with {threshold['confidence']:.0%} confidence"
    if threshold["chosen"] == NEVER_EXIT:
        return f"No threshold could be certified ({bound}): in early_exit no token leaves. More samples may help."
    row = next(row for row in threshold["table"] if row["exit_threshold"] == threshold["chosen"])
    return (
        f"exit_threshold {threshold['chosen']:g} ({bound}): measured disagreement {row['disagreement']:.2%}, "
        f"depth {row['depth_fraction']:.1%} of the layers."
    )
