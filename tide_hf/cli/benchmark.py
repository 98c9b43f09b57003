"""``tide-hf benchmark``: compares plain ``generate``, TIDE and transformers' own methods on your model and prompts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..common.busy import warn_if_busy
from ..common.errors import MissingPackageError
from ..common.token_ids import encode_prompt
from ..evaluation.benchmark import (
    DecodingMethod,
    Result,
    assistant_early_exit,
    compare,
    count_runs,
    prompt_lookup,
    runnable_methods,
    runs_note,
    tide_methods,
    without_drafts,
)
from ..hub.provenance import provenance
from .model_arguments import NO_ROUTERS, Loaded, load, modes_to_run
from .parser import refuse_unused
from .prompts import PROMPTS, check_room, given_prompts, read_prompts

CLONE = Path(__file__).parent.parent.parent  # root of the repository, if the package was installed from a clone
SUITE_OPTIONS = ("config", "output_dir")
PASSED_ON = ("model", "routers", "dtype", "device", "threads", *SUITE_OPTIONS)
PROMPT_OPTIONS = (
    *("mode", "exit_threshold", "engine", "compute_dtype", "max_new_tokens"),
    *("prompt", "prompts", "raw", "repeats", "json"),
)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.suite is not None:
        refuse_unused(args, PROMPT_OPTIONS, "with --suite")
        _run_suites(args)
        return
    refuse_unused(args, SUITE_OPTIONS, "without --suite")
    prompts = given_prompts(args.prompt) + (read_prompts(args.prompts) if args.prompts is not None else [])
    prompts = prompts or list(PROMPTS)
    console = Console(stderr=args.json)
    loaded = load(args)
    inputs = encode_prompts(loaded, prompts, args)
    plain, *ours = methods_of(loaded, args)
    record = setting(loaded, args.engine, console)
    theirs, left_out = runnable_methods([prompt_lookup(loaded.model), assistant_early_exit(loaded.model)], inputs[0])
    record = measure([plain, *theirs, *ours], inputs, record, args, console)
    for name, reason in left_out.items():
        note = f"{name}: left out, since this model does not support it ({reason})."
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if args.json:
        print(json.dumps(record | {"prompts": prompts, "raw": args.raw, "left_out": left_out}, indent=2))


def encode_prompts(loaded: Loaded, prompts: Sequence[str], args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Encode prompts as inputs of `generate`, and check that each fits the model together with its answer."""
    inputs = [encode_prompt(loaded.tokenizer, prompt, raw=getattr(args, "raw", False)) for prompt in prompts]
    for encoded in inputs:
        check_room(loaded.model, encoded["input_ids"].shape[1], args.max_new_tokens)
    return inputs


def methods_of(loaded: Loaded, args: argparse.Namespace) -> list[DecodingMethod]:
    """The methods to measure: plain `generate`, the engine alone, then the modes that --mode selects."""
    modes = modes_to_run(args.mode, loaded.routers)
    options = {"exit_threshold": args.exit_threshold, "engine": args.engine, "compute_dtype": args.compute_dtype}
    plain, *ours = tide_methods(loaded.model, loaded.routers, modes, **options)
    return [plain, *(without_drafts(one) for one in ours if one.name == "self_speculative"), *ours]


def setting(loaded: Loaded, engine: str, console: Console) -> dict[str, Any]:
    """Return facts about model, routers, engine and machine, ready for JSON, and print the main ones."""
    num_layers = loaded.model.config.get_text_config().num_hidden_layers
    facts = {"routers": loaded.routers_origin, "engine": engine, "num_hidden_layers": num_layers}
    record = provenance(loaded.model) | facts
    threads = record["torch_threads"]
    lines = (
        f"model    {record['model']}, {record['dtype']}, from {record['weights_origin']}",
        f"routers  {record['routers'] or NO_ROUTERS}",
        f"engine   {record['engine']}",
        f"machine  {record['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}, device {record['device']}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return record


def measure(
    methods: Sequence[DecodingMethod],
    inputs: Sequence[dict[str, torch.Tensor]],
    record: dict[str, Any],
    args: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """Compare the methods, with a progress bar, print the table and its notes, and add the figures to the record."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    options = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Measuring", total=count_runs(len(methods), len(inputs), args.repeats))
        results = compare(methods, inputs, **options, progress=lambda: progress.advance(task))
    console.print(comparison_table(results, record["num_hidden_layers"]))
    for note in notes(results, args.max_new_tokens):
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
    return record | options | {"results": [result.to_dict() for result in results]}


def comparison_table(results: Sequence[Result], num_layers: int) -> Table:
    """The table of results: one row per method, plain `generate` first."""
    prompts = len(results[0].prompts)
    title = f"{prompts} {'prompt' if prompts == 1 else 'prompts'}, {num_layers} layers, greedy"
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, title=title)  # fits 80 columns
    table.add_column("\ndecoding", no_wrap=True)
    knows_float32 = results[0].num_as_float32 is not None
    equality = "as in\nfloat32" if knows_float32 else "equal\ntokens"
    for column in ("\ntokens/s", "\nspeed-up", "\nby prompt", "layers/\ntoken", "drafts\naccepted", equality):
        table.add_column(column, justify="right", no_wrap=True)
    for position, result in enumerate(results):
        is_plain = position == 0
        layers = num_layers if is_plain else result.layers_per_token
        acceptance = result.acceptance_rate
        num_equal = result.num_as_float32 if knows_float32 else result.num_equal
        equal = "yes" if num_equal == prompts else f"{num_equal} of {prompts}"
        table.add_row(
            result.method.name,
            f"{result.tokens_per_s:.1f}",
            *(("1.00", "") if is_plain else _speedup(result)),
            "" if layers is None else f"{layers:.1f}",
            "" if acceptance is None else f"{acceptance:.0%}",
            "" if is_plain and not knows_float32 else equal,
        )
    return table


def _speedup(result: Result) -> tuple[str, str]:
    """Format the overall speed-up and its range over prompts."""
    per_prompt = [prompt.speedup for prompt in result.prompts]
    return f"{result.speedup:.2f}", f"{min(per_prompt):.2f}-{max(per_prompt):.2f}"


def notes(results: Sequence[Result], max_new_tokens: int) -> list[str]:
    """The notes below the table."""
    lines = [
        f"Tokens per second: at most {max_new_tokens} new tokens, prefill included, {runs_note(results)}, after an "
        "untimed one. Speed-up over generate of the same weights in this process."
    ]
    if results[0].num_as_float32 is not None:
        lines.append(
            "As in float32: answers that are generate's of the same weights loaded in float32. Rounding in a lower "
            "precision decides near-ties, so generate's own answers may differ from these."
        )
    for result in results:
        name, threshold = result.method.name, result.method.exit_threshold
        if result.method.lossless and result.num_equal < len(result.prompts):
            lines.append(
                f"{name}: tokens differ from generate's, which in float32 is an error."
                if result.method.must_be_equal
                else f"{name}: {result.num_equal} of {len(result.prompts)} answers are generate's own. Below float32 "
                "one may differ after a near-tie, as it does between generate and generate in another batch."
            )
        if threshold is not None:
            lines.append(
                f"{name}: approximate, exit_threshold {threshold:g}; on average the first {result.same_start:.0%} of "
                "an answer's tokens are generate's."
                + (" It runs all layers, so no speed-up is expected." if name == "post_hoc" else "")
            )
    return lines


def _run_suites(args: argparse.Namespace) -> None:
    """Run `python -m examples.benchmarks run`, which is part of the repository, not of the package."""
    if not (CLONE / "examples" / "benchmarks" / "__main__.py").is_file():
        raise MissingPackageError(
            "the suites are not there",
            got="an installed package without examples/benchmarks",
            expected="a clone of the repository, installed with pip install -e",
            do="Clone it, or leave --suite out.",
        )
    warn_if_busy(args.threads)
    command = [sys.executable, "-m", "examples.benchmarks", "run"]
    for name in args.suite:
        command += ["--suite", name]
    for name in PASSED_ON:
        if getattr(args, name) is not None:
            command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    path = os.pathsep.join(filter(None, [str(CLONE), os.environ.get("PYTHONPATH")]))
    status = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
    if status != 0:
        sys.exit(status)  # the benchmark process has printed the error
