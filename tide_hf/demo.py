"""``tide-hf demo``: shows how deep each token of an answer ran, then measures every mode against plain ``generate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .arguments import check_writable
from .benchmark import Contender, Result, compare, count_runs, encode_prompt, tide_contenders
from .configuration_tide import MODES
from .demo_model import DEFAULT_MODEL, load_demo_model
from .errors import ConfigurationError, describe
from .modeling_tide import TIDERouters
from .provenance import provenance
from .streaming import stream_answer

PROMPTS = (
    "What can I do to sleep better? Give me a few tips.",
    "Copy this note word for word, but write Thursday instead of Tuesday:\n\n"
    "Dear neighbours, on Tuesday the water in our street will be turned off from nine in the morning until noon. "
    "Please fill a kettle and a bucket before nine on Tuesday, and let the tap run for a minute after noon. "
    "If the water is not back by one on Tuesday, call the office at the town hall. Kind regards, the town hall.",
    "Write a Python function that tells whether a word is a palindrome, and show how to use it.",
)


@dataclass(frozen=True)
class DemoOptions:
    """What `tide-hf demo` was asked for; see its `--help`."""

    model: str = DEFAULT_MODEL
    routers: str | None = None
    modes: tuple[str, ...] = MODES
    prompts: tuple[str, ...] = PROMPTS
    max_new_tokens: int = 64
    dtype: str = "float32"
    threads: int | None = None
    exit_threshold: float | None = None
    repeats: int = 3
    json_file: Path | None = None


def run_demo(options: DemoOptions, console: Console) -> None:
    """Load, stream, measure, print and save.

    Args:
        options: What was asked for.
        console: Where everything is printed.
    """
    if options.json_file is not None:
        check_writable(options.json_file, "--json")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_demo_model(options.model, dtype=options.dtype, console=console)
    folder = options.routers or shipped_routers(options.model)
    routers = TIDERouters.from_pretrained(folder) if folder is not None else None
    contenders = tide_contenders(model, routers, _modes(options, routers), exit_threshold=options.exit_threshold)
    record = provenance(model) | {"routers": options.routers or (folder and f"shipped, {Path(folder).name}")}
    _print_setting(record, console)
    inputs = [encode_prompt(tokenizer, prompt) for prompt in options.prompts]
    for prompt, encoded in zip(options.prompts, inputs, strict=True):
        console.print()
        console.print(Padding(Text(prompt, style="italic"), (0, 0, 0, 2)))
        stream_answer(contenders[1], tokenizer, encoded, options.max_new_tokens, console)
    results = _measure(contenders, inputs, options, console)
    num_layers = model.config.get_text_config().num_hidden_layers
    console.print(comparison_table(results, num_layers))
    for note in notes(results, options.max_new_tokens, options.repeats):
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
    if options.json_file is not None:
        settings = {name: getattr(options, name) for name in ("max_new_tokens", "repeats", "prompts")}
        record |= settings | {"num_hidden_layers": num_layers, "results": [result.to_dict() for result in results]}
        options.json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        console.print(f"The figures are in {options.json_file}.", markup=False, highlight=False, soft_wrap=True)


def shipped_routers(model: str) -> str | None:
    """The folder of routers for `model` that comes with this library, in the source tree or installed, if any."""
    package = Path(__file__).parent
    for cards in (package.parent / "model_cards", package / "model_cards"):
        folder = cards / model.replace("/", "--")
        if (folder / "config.json").is_file():
            return str(folder)
    return None


def _modes(options: DemoOptions, routers: TIDERouters | None) -> list[str]:
    """The modes that can run; without routers, exits cannot."""
    if routers is not None:
        return list(options.modes)
    if "self_speculative" not in options.modes:
        raise ConfigurationError(
            describe(
                f"no routers for {options.model}",
                got=f"--mode {options.modes[0]}, which needs them",
                expected="a folder or Hub repository of routers",
                do="Pass --routers, or make some with tide_hf.calibrate(model, tokenizer).",
            )
        )
    return ["self_speculative"]


def _measure(
    contenders: Sequence[Contender], inputs: Sequence[dict[str, torch.Tensor]], options: DemoOptions, console: Console
) -> list[Result]:
    console.print()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Measuring", total=count_runs(len(contenders), len(inputs), options.repeats))
        return compare(
            contenders,
            inputs,
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            progress=lambda: progress.advance(task),
        )


def comparison_table(results: Sequence[Result], num_layers: int) -> Table:
    """One row per contender, plain `generate` first."""
    title = f"{len(results[0].prompts)} prompts, {num_layers} layers, greedy"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title)  # fits 80 columns
    table.add_column("\ndecoding", no_wrap=True)
    for column in ("\ntokens/s", "\nspeed-up", "\nby prompt", "layers\nper token", "drafts\naccepted", "equal\ntokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for position, result in enumerate(results):
        layers, acceptance = result.layers_per_token, result.acceptance_rate
        speedup, by_prompt = ("1.00", "") if position == 0 else _speedup(result)
        table.add_row(
            result.contender.name,
            f"{result.tokens_per_s:.1f}",
            speedup,
            by_prompt,
            f"{num_layers if layers is None else layers:.1f}",
            "" if acceptance is None else f"{acceptance:.0%}",
            "" if position == 0 else _equality(result),
        )
    return table


def _speedup(result: Result) -> tuple[str, str]:
    """Overall, and the span over the prompts; none where a lossless mode was not."""
    if result.speedup is None:
        return "differs", ""
    per_prompt = [prompt.speedup for prompt in result.prompts]
    return f"{result.speedup:.2f}", f"{min(per_prompt):.2f}-{max(per_prompt):.2f}"


def _equality(result: Result) -> str:
    if result.num_equal == len(result.prompts):
        return "yes"
    return f"{result.num_equal} of {len(result.prompts)}"


def notes(results: Sequence[Result], max_new_tokens: int, repeats: int) -> list[str]:
    """What has to be known to read the table."""
    lines = [
        f"Tokens per second: at most {max_new_tokens} new tokens, the prompt's own pass included, median of {repeats} "
        "interleaved runs after one that is not counted. Speed-up over generate of the same weights in this process."
    ]
    for result in results:
        name, threshold = result.contender.name, result.contender.exit_threshold
        if result.contender.lossless and result.speedup is None:
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


def _print_setting(record: dict[str, Any], console: Console) -> None:
    routers = record["routers"] or "none: drafts come from n-grams alone, early_exit and post_hoc cannot run"
    lines = (
        f"model    {record['model']}, {record['dtype']}, from {record['weights_origin']}",
        f"routers  {routers}",
        f"machine  {record['cpu']}, {record['torch_threads']} threads, device {record['device']}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
