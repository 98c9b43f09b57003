"""Comparison of decoding methods in the terminal: a progress bar, then a table with notes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..evaluation.benchmark import DecodingMethod, Result, compare, count_runs
from ..hub.provenance import provenance
from .model_arguments import NO_ROUTERS, Loaded


def setting(loaded: Loaded, engine: str) -> dict[str, Any]:
    """Model, routers, engine and machine, ready for JSON."""
    num_layers = loaded.model.config.get_text_config().num_hidden_layers
    facts = {"routers": loaded.routers_origin, "engine": engine, "num_hidden_layers": num_layers}
    return provenance(loaded.model) | facts


def print_setting(record: dict[str, Any], console: Console) -> None:
    """Print the main part of `setting`."""
    threads = record["torch_threads"]
    lines = (
        f"model    {record['model']}, {record['dtype']}, from {record['weights_origin']}",
        f"routers  {record['routers'] or NO_ROUTERS}",
        f"engine   {record['engine']}",
        f"machine  {record['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}, device {record['device']}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def measure(
    methods: Sequence[DecodingMethod],
    inputs: Sequence[dict[str, torch.Tensor]],
    record: dict[str, Any],
    args: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """Compare the methods behind a progress bar, and print the table and its notes.

    Args:
        methods: As for `benchmark.compare`.
        inputs: As for `benchmark.compare`.
        record: The `setting`.
        args: `max_new_tokens` and `repeats`.
        console: Where to print.

    Returns:
        The record with what was asked for and all figures, ready for JSON.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    options = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Measuring", total=count_runs(len(methods), len(inputs), args.repeats))
        results = compare(methods, inputs, **options, progress=lambda: progress.advance(task))
    console.print(comparison_table(results, record["num_hidden_layers"]))
    for note in notes(results, **options):
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
    return record | options | {"results": [result.to_dict() for result in results]}


def comparison_table(results: Sequence[Result], num_layers: int) -> Table:
    """One row per method, plain `generate` first."""
    prompts = len(results[0].prompts)
    title = f"{prompts} {'prompt' if prompts == 1 else 'prompts'}, {num_layers} layers, greedy"
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, title=title)  # fits 80 columns
    table.add_column("\ndecoding", no_wrap=True)
    for column in ("\ntokens/s", "\nspeed-up", "\nby prompt", "layers/\ntoken", "drafts\naccepted", "equal\ntokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for position, result in enumerate(results):
        layers = num_layers if position == 0 else result.layers_per_token
        acceptance = result.acceptance_rate
        speedup, by_prompt = ("1.00", "") if position == 0 else _speedup(result)
        table.add_row(
            result.method.name,
            f"{result.tokens_per_s:.1f}",
            speedup,
            by_prompt,
            "" if layers is None else f"{layers:.1f}",
            "" if acceptance is None else f"{acceptance:.0%}",
            "" if position == 0 else _equality(result),
        )
    return table


def _speedup(result: Result) -> tuple[str, str]:
    """Overall speed-up and its range over prompts; none if a lossless mode's tokens differ."""
    if result.speedup is None:
        return "differs", ""
    per_prompt = [prompt.speedup for prompt in result.prompts]
    return f"{result.speedup:.2f}", f"{min(per_prompt):.2f}-{max(per_prompt):.2f}"


def _equality(result: Result) -> str:
    if result.num_equal == len(result.prompts):
        return "yes"
    return f"{result.num_equal} of {len(result.prompts)}"


def notes(results: Sequence[Result], max_new_tokens: int, repeats: int) -> list[str]:
    """Notes to the table."""
    runs = "one run" if repeats == 1 else f"median of {repeats} interleaved runs"
    lines = [
        f"Tokens per second: at most {max_new_tokens} new tokens, the prompt's own pass included, {runs} "
        "after one that is not counted. Speed-up over generate of the same weights in this process."
    ]
    for result in results:
        name, threshold = result.method.name, result.method.exit_threshold
        if result.method.lossless and result.speedup is None:
            lines.append(
                f"{name}: tokens differ from generate's, so there is no speed-up to give. In half precision a wider "
                "pass can decide near-ties otherwise."
            )
        if threshold is not None:
            lines.append(
                f"{name}: approximate, exit_threshold {threshold:g}; the first {result.same_start:.0%} of an answer's "
                "tokens are generate's, on average."
                + (" It runs all layers, so no speed is to be expected." if name == "post_hoc" else "")
            )
    return lines
