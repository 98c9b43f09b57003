"""Table and plot of a quality record. The plot needs matplotlib: `pip install tide-hf[plots]`."""

from __future__ import annotations

import os
from typing import Any

from ..common.display import DOTS_PER_INCH, SIZE, figure_maker
from ..routers.tables import MISSING, TextTable

DEPTH_NOTE = (
    "Depth: mean layer that tokens are read from, over the number of layers; counted, not timed. Intervals: "
    "{confidence:.0%} by resampling documents."
)
PERPLEXITY_NOTE = (
    "Perplexity of {num_tokens:,} tokens in {num_documents:,} documents of at most {max_length} tokens, each read by "
    "itself. Every token counts as decoded by itself after exact K/V: what kv_cache_strategy='recompute' gives, and "
    "post_hoc. Agreement: the top token is the full model's."
)
OTHER_STRATEGY_NOTE = "These routers have kv_cache_strategy={strategy!r}, with which perplexity will be another."


def quality_table(record: dict[str, Any]) -> tuple[str, TextTable, str]:
    """Title, table and note of what was measured."""
    part = record["perplexity"]
    note = f"{PERPLEXITY_NOTE.format(**part)} {DEPTH_NOTE.format(**record)}"
    if record["kv_cache_strategy"] != "recompute":
        note += " " + OTHER_STRATEGY_NOTE.format(strategy=record["kv_cache_strategy"])
    return f"Perplexity on {part['data']}", _perplexity_table(part["rows"]), note


def _perplexity_table(rows: list[dict[str, Any]]) -> TextTable:
    headings = ["threshold", "perplexity", "interval", "over base", "interval", "agreement", "depth"]
    cells = [
        [
            _threshold(row),
            _value(row, "perplexity", ".2f"),
            _interval(row, "perplexity", ".1f"),
            _value(row, "ratio", ".3f"),
            _interval(row, "ratio", ".3f"),
            _value(row, "agreement", ".1%"),
            _value(row, "depth_fraction", ".1%"),
        ]
        for row in rows
    ]
    return TextTable(headings, cells)


def _threshold(row: dict[str, Any]) -> str:
    return "base" if row["exit_threshold"] is None else f"{row['exit_threshold']:g}"


def _value(row: dict[str, Any], name: str, form: str) -> str:
    return format(row[name]["value"], form) if name in row else MISSING


def _interval(row: dict[str, Any], name: str, form: str) -> str:
    interval = row[name]["interval"] if name in row else None
    return MISSING if interval is None else " to ".join(format(end, form) for end in interval)


def save_quality_plot(record: dict[str, Any], file: str | os.PathLike[str]) -> None:
    """Draw perplexity over the base model's against depth.

    Args:
        record: From `measure_quality`.
        file: Where to write.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure = figure_maker()(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
    draw_curve(figure.subplots(), record["perplexity"])
    figure.savefig(file, format="png")


def draw_curve(axes: Any, part: dict[str, Any]) -> None:
    """A point per threshold with its interval, and a line where the base model is."""
    rows = part["rows"][1:]
    depths = [100 * row["depth_fraction"]["value"] for row in rows]
    values = [row["ratio"]["value"] for row in rows]  # paired with the base model's, so the intervals are narrower
    ends = [row["ratio"]["interval"] or [row["ratio"]["value"]] * 2 for row in rows]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)]
    axes.errorbar(depths, values, yerr=[below, above], marker="o", capsize=2, label="TIDE at these thresholds")
    for row, *point in zip(rows, depths, values, strict=True):
        text = f"{row['exit_threshold']:g}"
        axes.annotate(text, point, fontsize="small", textcoords="offset points", xytext=(4, 4))
    axes.axhline(1.0, color="grey", linestyle="--", label="base model")
    axes.set(title=part["data"], xlabel="depth (% of the layers)", ylabel="perplexity over the base model's")
    axes.margins(x=0.1)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
