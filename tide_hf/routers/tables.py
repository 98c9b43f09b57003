"""Tables of a calibration record, for terminal and card. Older records lack some figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from ..common.choices import NEVER_EXIT, is_number
from ..common.errors import ConfigurationError, first_line, short

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
    "Agreement: the head's first token after a full-depth pass is the full model's. AUC and calibration error are of "
    "its score as a prediction of that. Documents before: those that earlier calibrations trained it on."
)
CURVE_NOTE = (
    "Tokens: those that training has read so far, again in each epoch. Agreement is that of the head's first drafts on "
    "the tune split."
)
TOLERANCE_NOTE = (
    "Each bound holds by itself, so choose the tolerance before looking. The interval is for the measured "
    "disagreement, by resampling documents."
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


def check_record(record: Any) -> None:
    """Refuse a calibration record that the tables or the drafting policy cannot read, by reading it as they do."""
    try:
        tables_of(record, 1)
        layers = rows_by_layer(record)
        heads = [row for _, row in layers] + ([record["draft_head"]] if "draft_head" in record else [])
        if not all(0 < layer < 10**4 for layer, _ in layers):
            raise ValueError("an exit layer that no model has")
        if not all(0 <= row["agreement"] <= 1 for row in heads):
            raise ValueError("an agreement that is not from 0 to 1")
        counts = [record.get("num_documents", 0), *(row.get("documents_before", 0) for row in heads)]
        if not all(type(count) is int and 0 <= count <= 2**63 for count in counts):
            raise ValueError("a number of documents that is no whole number")
        numbers = [end for row in record.get("tolerances", []) for end in row.get("interval") or []]
        if "threshold" in record:
            numbers += [record["threshold"][name] for name in ("tolerance", "confidence", "chosen")]
        if not all(map(is_number, numbers)):
            raise ValueError("an interval or a threshold that is no finite number")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(
            "the calibration record cannot be read",
            got=short(f"{type(error).__name__}: {first_line(error)}"),
            expected="agreements from 0 to 1, numbers of documents, and finite numbers for the other figures",
            do="Make new routers with tide_hf.calibrate().",
        ) from error


def tables_of(record: dict[str, Any], num_layers: int) -> list[tuple[str, TextTable, str]]:
    """Return the title, table and note of each table for which the record has figures."""
    layers = [(f"{layer} of {num_layers}", row) for layer, row in rows_by_layer(record)]
    head = record.get("draft_head") or {}
    heads = [(shown(head["parameters"], ","), head)] if head.get("parameters") else []
    tables = [
        ("Exit layers", _figures_table("exit layer", layers, LAYER_COLUMNS), LAYER_NOTE),
        ("Draft head", _figures_table("parameters", heads, HEAD_COLUMNS), HEAD_NOTE),
        ("Training of the draft head", _curve_table(head), CURVE_NOTE),
        ("Coverage", _coverage_table(record), COVERAGE_NOTE),
        ("Tolerances", _tolerance_table(record), TOLERANCE_NOTE),
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
    rows = [[str(epoch), shown(point["tokens"], ","), shown(point["agreement"], ".1%")] for epoch, point in curve]
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
    """Format a figure with a format specification of Python; `missing` replaces `None`. `ValueError` if it is none."""
    if not (value is None or is_number(value)):
        raise ValueError(f"{short(value)} for a finite number")
    return missing if value is None else format(value, form)


def shown_interval(ends: Sequence[float] | None, form: str) -> str:
    """Format both ends of an interval."""
    if ends is None:
        return MISSING
    low, high = ends
    return f"{low:{form}} to {high:{form}}"


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


def describe_threshold(threshold: dict[str, Any]) -> str:
    """One sentence on the chosen threshold."""
    bound = describe_bound(threshold)
    if threshold["chosen"] == NEVER_EXIT:
        return f"No threshold could be certified ({bound}): in early_exit no token exits. More samples may help."
    row = next(row for row in threshold["table"] if row["exit_threshold"] == threshold["chosen"])
    return (
        f"exit_threshold {threshold['chosen']:g} ({bound}): measured disagreement {row['disagreement']:.2%}, "
        f"depth {row['depth_fraction']:.1%} of the layers."
    )
