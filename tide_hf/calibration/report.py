"""What people see of a calibration: progress bars, the record that goes into the config, and the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..base_model.structure import DecoderStructure
from ..hub.provenance import machine
from ..routers.routers import TIDERouters
from ..routers.tables import describe_threshold, rich_table, tables_of
from .data import Document, Splits, num_positions
from .figures import layer_figures, layer_sizes, tolerance_rows
from .threshold import Decisions, ThresholdChoice

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 60  # in a log


class Steps:
    """One progress bar a step; where there is neither a terminal nor a notebook, lines for a log.

    Args:
        enabled: Whether to show anything.
    """

    def __init__(self, enabled: bool) -> None:
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._console = console = Console(stderr=True)
        seen = console.is_terminal or console.is_jupyter
        self._progress = Progress(*columns, *times, console=console, disable=not (enabled and seen))
        self._is_log = enabled and not seen

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, description: str, total: int) -> Callable[[int], None]:
        """Start a step of `total` units; the result is to be called with the number of units done."""
        if self._is_log:
            return _LogLines(self._console, description, total)
        task = self._progress.add_task(description, total=total)
        return lambda count: self._progress.update(task, advance=count)

    def track(self, description: str, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Yield `items` and move the bar after each."""
        advance = self.begin(description, total)
        for item in items:
            yield item
            advance(1)


class _LogLines:
    """Tells a log that a step begins, and once a minute how far it is."""

    def __init__(self, console: Console, description: str, total: int) -> None:
        self._console, self._description, self._total = console, description, total
        self._num_done, self._told = 0, perf_counter()
        self._tell()

    def __call__(self, count: int) -> None:
        """So many units more are done."""
        self._num_done += count
        now = perf_counter()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            self._tell()

    def _tell(self) -> None:
        self._console.print(f"{self._description}: {self._num_done} of {self._total}", highlight=False)


def calibration_record(
    decisions: Decisions,
    choice: ThresholdChoice,
    documents: Sequence[Document],
    splits: Splits,
    routers: TIDERouters,
    structure: DecoderStructure,
) -> dict[str, Any]:
    """What a calibration measured, ready for JSON."""
    sizes = layer_sizes(routers, structure)
    layers = {layer: row | sizes[layer] for layer, row in layer_figures(decisions, choice.chosen).items()}
    return (
        {"exit_layers": layers, "threshold": choice.to_dict(), "tolerances": tolerance_rows(decisions, choice)}
        | data_figures(documents, splits)
        | {"versions": versions(), "machine": machine(routers.device)}
    )


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
    console = Console(stderr=True)
    for title, table, note in tables_of(record, num_layers):
        console.print(rich_table(title, table))
        console.print(note, highlight=False)
        console.print()
    console.print(describe_threshold(record["threshold"]))
