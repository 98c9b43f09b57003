"""Tables of a calibration record, for terminal and card. Older records lack some figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from .config import NEVER_EXIT

MISSING = "-"
LAYER_NOTE = (
    "Agreement: the exit head's top token is the full model's; AUC and calibration error are of the router's score as "
    "a prediction of that. Leaving: share of tokens that leave there at the chosen threshold. Head: of the exit head "
    "alone, in bfloat16. Cost: share of a full pass's weights that an exit there reads, its heads included; counted, "
    "not timed."
)
COVERAGE_NOTE = (
    "Coverage: share of tokens that would leave if the layer stood alone and at least so many of those that leave had "
    "to agree. The threshold for it is picked on these same documents, so new text does a little worse."
)
BLOCK_NOTE = (
    "The block head only drafts (self_speculative). Agreement: its top token, given the true states before, is the "
    "full model's; along a draft it leans on its own guesses and agrees less often. AUC and calibration error are of "
    "the probability that it gives to that token, as a prediction of that."
)
DOCUMENTS_BEFORE = "documents before"
DOCUMENTS_BEFORE_NOTE = " Documents before: those that earlier calibrations trained it on."
TOLERANCE_NOTE = (
    "Each promise holds by itself, so pick the tolerance before looking. The interval is for the measured "
    "disagreement, by resampling documents."
)


@dataclass(frozen=True)
class TextTable:
    """Headings and rows of text."""

    headings: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As a table of Markdown."""
        lines = [self.headings, ["---:"] * len(self.headings), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables_of(record: dict[str, Any], num_layers: int) -> list[tuple[str, TextTable, str]]:
    """Titles, tables and notes; tables that an older record lacks are left out."""
    block = block_table(record, num_layers)
    block_note = BLOCK_NOTE + (DOCUMENTS_BEFORE_NOTE if DOCUMENTS_BEFORE in block.headings else "")
    tables = [
        ("Exit layers", layer_table(record, num_layers), LAYER_NOTE),
        ("Block head", block, block_note),
        ("Coverage", coverage_table(record), COVERAGE_NOTE),
        ("Tolerances", tolerance_table(record), TOLERANCE_NOTE),
    ]
    return [(title, table, note) for title, table, note in tables if table.rows]


def rows_by_layer(record: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Exit layers, ascending, and their figures; JSON keys are strings."""
    figures = record.get("exit_layers", {})
    return sorted((int(layer), row) for layer, row in figures.items())


def layer_table(record: dict[str, Any], num_layers: int) -> TextTable:
    """One row per exit layer."""
    columns = {
        "exit layer": lambda layer, row: f"{layer} of {num_layers}",
        "agreement": lambda _, row: _percent(row.get("agreement")),
        "router AUC": lambda _, row: _number(row.get("router_auc")),
        "calibration error": lambda _, row: _number(row.get("expected_calibration_error")),
        "leaving": lambda _, row: _percent(row.get("exit_rate")),
        "head parameters": lambda _, row: _count(row.get("head_parameters")),
        "head MB": lambda _, row: MISSING if row.get("head_mb") is None else f"{row['head_mb']:.2f}",
        "cost": lambda _, row: _percent(row.get("cost")),
    }
    rows = [[cell(layer, row) for cell in columns.values()] for layer, row in rows_by_layer(record)]
    return _without_empty_columns(list(columns), rows)


def block_table(record: dict[str, Any], num_layers: int) -> TextTable:
    """One row if there is a block head."""
    headings = ["after layer", "agreement", "confidence AUC", "calibration error"]
    headings += ["parameters", "epochs", DOCUMENTS_BEFORE]
    block = record.get("block")
    if block is None:
        return TextTable(headings, [])
    figures = [_number(block.get(name)) for name in ("confidence_auc", "expected_calibration_error")]
    row = [f"{block['layer']} of {num_layers}", _percent(block["agreement"]), *figures]
    row += [_count(block["parameters"]), _count(block["epochs"]), _count(block.get("documents_before"))]
    return _without_empty_columns(headings, [row])


def coverage_table(record: dict[str, Any]) -> TextTable:
    """One row per exit layer, one column per precision; empty for older records."""
    known = [(layer, row["coverage"]) for layer, row in rows_by_layer(record) if "coverage" in row]
    precisions = sorted(known[0][1], key=float, reverse=True) if known else []
    rows = [[str(layer), *(_percent(coverage.get(precision)) for precision in precisions)] for layer, coverage in known]
    return TextTable(["exit layer", *(f"{float(precision):.0%} agree" for precision in precisions)], rows)


def tolerance_table(record: dict[str, Any]) -> TextTable:
    """One row per tolerance; empty for older records."""
    confidence = (record.get("threshold") or {}).get("confidence", 0.95)
    rows = []
    for row in record.get("tolerances", []):
        interval = [_percent(end, 2) for end in row.get("interval") or ()]
        rows.append(
            [
                _percent(row["tolerance"]),
                "none" if row.get("exit_threshold") is None else f"{row['exit_threshold']:g}",
                _percent(row.get("disagreement"), 2),
                " to ".join(interval) or MISSING,
                _percent(row.get("depth_fraction")),
            ]
        )
    return TextTable(["tolerance", "certified threshold", "disagreement", f"{confidence:.0%} interval", "depth"], rows)


def rich_table(title: str, table: TextTable) -> Table:
    """For a terminal of 80 columns."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for heading in table.headings:
        shown.add_column("\n".join(heading.split()), justify="right", overflow="fold")  # no figure loses digits
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
        return f"No threshold could be certified ({bound}): in early_exit no token leaves. More samples may help."
    row = next(row for row in threshold["table"] if row["exit_threshold"] == threshold["chosen"])
    return (
        f"exit_threshold {threshold['chosen']:g} ({bound}): measured disagreement {row['disagreement']:.2%}, "
        f"depth {row['depth_fraction']:.1%} of the layers."
    )


def _without_empty_columns(headings: list[str], rows: list[list[str]]) -> TextTable:
    known = [i for i in range(len(headings)) if any(row[i] != MISSING for row in rows)]
    return TextTable([headings[i] for i in known], [[row[i] for i in known] for row in rows])


def _percent(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else f"{value:.{digits}%}"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"
