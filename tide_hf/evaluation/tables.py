"""The table of a quality record, for the terminal."""

from __future__ import annotations

from typing import Any

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
