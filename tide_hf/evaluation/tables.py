"""The tables of a quality record, for the terminal."""

from __future__ import annotations

from typing import Any

from ..calibration.tables import MISSING, TextTable

DEPTH_NOTE = (
    "Depth: mean layer that tokens are read from, over the number of layers; counted, not timed. Intervals: "
    "{confidence} by resampling {items}."
)
PERPLEXITY_NOTE = (
    "Perplexity of {num_tokens:,} tokens in {num_documents:,} documents of at most {max_length} tokens, each read by "
    "itself. Every token counts as decoded by itself after exact K/V: what kv_cache_strategy='recompute' gives, and "
    "post_hoc. Agreement: the top token is the full model's."
)
OTHER_STRATEGY_NOTE = "These routers have kv_cache_strategy={strategy!r}, with which perplexity will be another."
EXACT_MATCH_NOTE = (
    "{num_questions:,} questions, greedy, in {mode}, at most {max_new_tokens} new tokens, match={match!r}. Over base: "
    "points more than the base model has, on the same questions. Same: answers whose tokens are all the base model's. "
    "Run: layers that ran, over those of plain decoding; in a batch a pass ends when all of its rows have left."
)


def quality_tables(record: dict[str, Any]) -> list[tuple[str, TextTable, str]]:
    """Titles, tables and notes of what was measured."""
    tables = []
    if "perplexity" in record:
        part = record["perplexity"]
        note = PERPLEXITY_NOTE.format(**part) + " " + _depth_note(record, "documents")
        if record["kv_cache_strategy"] != "recompute":
            note += " " + OTHER_STRATEGY_NOTE.format(strategy=record["kv_cache_strategy"])
        tables.append((f"Perplexity on {part['data']}", _perplexity_table(part["rows"]), note))
    if "exact_match" in record:
        part = record["exact_match"]
        note = EXACT_MATCH_NOTE.format(**part) + " " + _depth_note(record, "questions")
        tables.append((f"Exact match on {part['data']}", _exact_match_table(part["rows"]), note))
    return tables


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


def _exact_match_table(rows: list[dict[str, Any]]) -> TextTable:
    headings = ["threshold", "exact match", "interval", "over base", "interval", "same", "depth", "run"]
    cells = [
        [
            _threshold(row),
            _value(row, "exact_match", ".1%"),
            _interval(row, "exact_match", ".1f", scale=100),
            _value(row, "difference", "+.1%"),
            _interval(row, "difference", "+.1f", scale=100),
            _value(row, "same_answers", ".1%"),
            _value(row, "depth_fraction", ".1%"),
            f"{row['layers_executed_fraction']:.1%}" if "layers_executed_fraction" in row else MISSING,
        ]
        for row in rows
    ]
    return TextTable(headings, cells)


def _depth_note(record: dict[str, Any], items: str) -> str:
    return DEPTH_NOTE.format(confidence=f"{record['confidence']:.0%}", items=items)


def _threshold(row: dict[str, Any]) -> str:
    return "base" if row["exit_threshold"] is None else f"{row['exit_threshold']:g}"


def _value(row: dict[str, Any], name: str, form: str) -> str:
    return format(row[name]["value"], form) if name in row else MISSING


def _interval(row: dict[str, Any], name: str, form: str, scale: int = 1) -> str:
    interval = row[name]["interval"] if name in row else None
    return MISSING if interval is None else " to ".join(format(scale * end, form) for end in interval)
