"""Tables of a calibration record, for terminal and card. Older records lack some figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from .config import NEVER_EXIT

MISSING = "-"
LAYER_NOTE = (
    "Agreement: the exit head's top token is the full model's; AUC and calibration error are of the router's score as "
    "a prediction of that. Exit rate: share of tokens that exit there at the chosen threshold. Head: of the exit head "
    "alone, in bfloat16. Cost: share of a full pass's weights that an exit there reads, its heads included; counted, "
    "not timed."
)
COVERAGE_NOTE = (
    "Coverage: share of tokens that would exit if the layer stood alone and at least so many of those that exit had to "
    "agree. The threshold for it is chosen on these same documents, so new text does a little worse."
)
HEAD_NOTE = (
    "The draft head drafts (self_speculative), and tokens exit with it (early_exit). Agreement: its first token after "
    "a full-depth pass is the full model's. AUC and calibration error are of its score as a prediction of that. "
    "Documents before: those that earlier calibrations trained it on."
)
CURVE_NOTE = (
    "Tokens: those that training has read so far, again in each epoch. Agreement is that of the head's first drafts on "
    "the tune split."
)
TOLERANCE_NOTE = (
    "Each bound holds by itself, so choose the tolerance before looking. The interval is for the measured "
    "disagreement, by resampling documents."
)

HEAD_TOLERANCE_NOTE = (
    "Tokens that exit differ where they are not the full model's after the same text; those of full-depth passes never "
    "do. Runs of exits are followed as far as the documents go on with their tokens: what comes after a token that "
    "differs is left out. Depth: full-depth passes per token. " + TOLERANCE_NOTE
)

# Heading and format of each figure in the record.
LAYER_COLUMNS = {
    "agreement": ("agreement", ".1%"),
    "router_auc": ("router AUC", ".3f"),
    "expected_calibration_error": ("calibration error", ".3f"),
    "exit_rate": ("exit rate", ".1%"),
    "head_parameters": ("head parameters", ","),
    "head_mb": ("head MB", ".2f"),
    "cost": ("cost", ".1%"),
}
HEAD_COLUMNS = {
    "agreement": ("agreement", ".1%"),
    "confidence_auc": ("confidence AUC", ".3f"),
    "expected_calibration_error": ("calibration error", ".3f"),
    "epochs": ("epochs", ","),
    "documents_before": ("documents before", ","),
}


@dataclass(frozen=True)
class TextTable:
    """Headings and rows of text."""

    headings: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Format the table as Markdown."""
        lines = [self.headings, ["---:"] * len(self.headings), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables_of(record: dict[str, Any], num_layers: int) -> list[tuple[str, TextTable, str]]:
    """Return the title, table and note of each table for which the record has figures."""
    layers = [(f"{layer} of {num_layers}", row) for layer, row in rows_by_layer(record)]
    head = record.get("draft_head") or {}
    heads = [(f"{head['parameters']:,}", head)] if "parameters" in head else []
    tables = [
        ("Exit layers", _figures_table("exit layer", layers, LAYER_COLUMNS), LAYER_NOTE),
        ("Draft head", _figures_table("parameters", heads, HEAD_COLUMNS), HEAD_NOTE),
        ("Training of the draft head", _curve_table(head), CURVE_NOTE),
        ("Coverage", _coverage_table(record), COVERAGE_NOTE),
        ("Tolerances", _tolerance_table(record), TOLERANCE_NOTE),
        ("Tolerances of the draft head", _tolerance_table(head), HEAD_TOLERANCE_NOTE),
    ]
    return [(title, table, note) for title, table, note in tables if table.rows]


def rows_by_layer(record: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return exit layers as integers, ascending, with their figures."""
    return sorted((int(layer), row) for layer, row in record.get("exit_layers", {}).items())


def _figures_table(first: str, rows: list[tuple[str, Any]], columns: dict[str, tuple[str, str]]) -> TextTable:
    """Make a table of named rows; leave out columns for which no row has a figure."""
    known = {
        figure: column for figure, column in columns.items() if any(row.get(figure) is not None for _, row in rows)
    }
    cells = [[name, *(shown(row.get(figure), form) for figure, (_, form) in known.items())] for name, row in rows]
    return TextTable([first, *(heading for heading, _ in known.values())], cells)


def _curve_table(head: dict[str, Any]) -> TextTable:
    """One row per epoch."""
    curve = enumerate(head.get("curve") or [], start=1)
    rows = [[str(epoch), f"{point['tokens']:,}", shown(point["agreement"], ".1%")] for epoch, point in curve]
    return TextTable(["epoch", "tokens", "agreement"], rows)


def _coverage_table(record: dict[str, Any]) -> TextTable:
    """One row per exit layer, one column per precision; empty for older records."""
    known = [(layer, row["coverage"]) for layer, row in rows_by_layer(record) if row.get("coverage")]
    precisions = sorted(known[0][1], key=float, reverse=True) if known else []
    rows = [[str(layer), *(shown(coverage.get(one), ".1%") for one in precisions)] for layer, coverage in known]
    return TextTable(["exit layer", *(f"{float(precision):.0%} agree" for precision in precisions)], rows)


def _tolerance_table(record: dict[str, Any]) -> TextTable:
    """One row per tolerance; empty for older records."""
    confidence = (record.get("threshold") or {}).get("confidence", 0.95)
    rows = [
        [
            shown(row["tolerance"], ".1%"),
            shown(row.get("exit_threshold"), "g", missing="none"),
            shown(row.get("disagreement"), ".2%"),
            shown_interval(row.get("interval"), ".2%"),
            shown(row.get("depth_fraction"), ".1%"),
        ]
        for row in record.get("tolerances", [])
    ]
    return TextTable(["tolerance", "certified threshold", "disagreement", f"{confidence:.0%} interval", "depth"], rows)


def shown(value: float | None, form: str, missing: str = MISSING) -> str:
    """Format a figure with a format specification of Python; `missing` replaces `None`."""
    return missing if value is None else format(value, form)


def shown_interval(ends: Sequence[float] | None, form: str) -> str:
    """Format both ends of an interval."""
    return MISSING if ends is None else " to ".join(format(end, form) for end in ends)


def rich_table(title: str, table: TextTable) -> Table:
    """Make a table for a terminal of 80 columns."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for heading in table.headings:
        shown.add_column("\n".join(heading.split()), justify="right", overflow="fold")  # wraps figures, loses no digit
    for row in table.rows:
        shown.add_row(*row)
    return shown


def describe_bound(threshold: dict[str, Any]) -> str:
    """Tolerance and confidence of a certified threshold."""
    return f"disagreement below {threshold['tolerance']:.1%} with {threshold['confidence']:.0%} confidence"


def describe_thresholds(record: dict[str, Any]) -> list[str]:
    """A sentence on the threshold of exit layers, and one on the draft head's if there is one."""
    of_layers = describe_threshold(record["threshold"])
    head = (record.get("draft_head") or {}).get("threshold")
    if head is None:
        return [of_layers]
    return [f"Exit layers: {of_layers}", "Draft head: " + describe_threshold(head, "draft_exit_threshold")]


def describe_threshold(threshold: dict[str, Any], name: str = "exit_threshold") -> str:
    """One sentence on the chosen threshold."""
    bound = describe_bound(threshold)
    if threshold["chosen"] == NEVER_EXIT:
        return f"No threshold could be certified ({bound}): in early_exit no token exits. More samples may help."
    row = next(row for row in threshold["table"] if row["exit_threshold"] == threshold["chosen"])
    return (
        f"{name} {threshold['chosen']:g} ({bound}): measured disagreement {row['disagreement']:.2%}, "
        f"depth {row['depth_fraction']:.1%} of the layers."
    )
