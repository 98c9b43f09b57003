"""``tide-hf demo``: plain ``generate`` and TIDE answer the same prompts side by side, and a table compares them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..common.choices import EAGER
from ..common.progress import waiting
from ..evaluation.benchmark import (
    PromptResult,
    Result,
    compare_with,
    forget_answers,
    tide_methods,
    timed_run,
)
from .benchmark import encode_prompts, setting
from .demo_model import load_demo_model
from .model_arguments import load
from .prompts import PROMPTS, given_prompts
from .streaming import stream_side_by_side

NAMES = ("plain generate", "with TIDE")
UNTIMED_TOKENS = 8  # of each, before the first prompt, since a first call allocates buffers
MAX_SECONDS = 45  # with a loaded model, after which no built-in prompt begins: a slow machine shows a table as well
PROMPT_WIDTH = 28  # characters of a prompt in the table, which fits 80 columns


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    prompts = given_prompts(args.prompt) or list(PROMPTS)
    console = Console(stderr=args.json)
    waits = Console(stderr=True)
    waits.print(f"Loading {args.model} ...", markup=False, highlight=False, soft_wrap=True)
    loaded = load(args, load_demo_model)
    inputs = encode_prompts(loaded, prompts, args)
    start = perf_counter()
    with waiting(waits, "Attaching TIDE"):
        methods = tide_methods(loaded.model, loaded.routers, ["self_speculative"])
    methods[1].model.tide_warm_up()  # on a CPU, builds kernels once a machine, and shows its progress
    with waiting(waits, "Running both for a moment"):
        for method in methods:
            timed_run(method, inputs[0], UNTIMED_TOKENS)
    record = setting(loaded, EAGER, console)
    results = [Result(method, []) for method in methods]
    for prompt, encoded in zip(prompts, inputs, strict=True):
        if results[0].prompts and not args.prompt and perf_counter() - start > MAX_SECONDS:
            console.print("The other prompts are left out, since this machine takes long.", style="dim")
            break
        console.print(Padding(Text(prompt, style="italic"), (1, 0), expand=False))
        forget_answers(methods[1].model)
        answers = [partial(timed_run, method, encoded, args.max_new_tokens) for method in methods]
        runs = stream_side_by_side(dict(zip(NAMES, answers, strict=True)), loaded.tokenizer, console)
        for result, one in zip(results, runs, strict=True):
            result.prompts.append(PromptResult([one]))
    prompts = prompts[: len(results[0].prompts)]
    for result in results:
        compare_with(results[0], result)
    _print_table(prompts, results, args, console)
    if args.json:
        limit = {"max_new_tokens": args.max_new_tokens}
        figures = {"prompts": prompts, "results": [result.to_dict() for result in results]}
        print(json.dumps(record | limit | figures, indent=2))


def _print_table(prompts: Sequence[str], results: Sequence[Result], args: argparse.Namespace, console: Console) -> None:
    """Print how fast TIDE was beside plain `generate`, what the figures are, and where to go on."""
    console.print(Padding(comparison_table(prompts, results), (1, 0), expand=False))
    note = (
        f"At most {args.max_new_tokens} new tokens, greedy, prefill included; one run each, in turn, in this process, "
        "as streamed above, after model.tide_warm_up(). A speed is given where the tokens are those of generate."
    )
    console.print(note, style="dim", highlight=False)
    console.print(
        f"At length, with all modes and transformers' own methods: tide-hf benchmark {args.model}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def comparison_table(prompts: Sequence[str], results: Sequence[Result]) -> Table:
    """Speed and tokens of TIDE beside plain `generate`: a row per prompt, and one for all."""
    plain, tide = results
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, show_footer=len(prompts) > 1)
    is_equal = tide.speedup is not None
    columns: list[tuple[str, Any]] = [
        ("generate\ntokens/s", f"{plain.tokens_per_s:.1f}"),
        ("TIDE\ntokens/s", f"{tide.tokens_per_s:.1f}"),
        ("\nspeed", f"{tide.speedup:.2f}" if is_equal else "differs"),
        ("tokens\nequal", f"{tide.num_equal} of {len(prompts)}"),
        ("tokens\na pass", f"{tide.tokens_per_pass:.2f}"),
    ]
    table.add_column("\nprompt", "all", no_wrap=True, max_width=PROMPT_WIDTH)
    for heading, footer in columns:
        table.add_column(heading, footer, justify="right", no_wrap=True)
    for prompt, base, ours in zip(prompts, plain.prompts, tide.prompts, strict=True):
        table.add_row(
            Text(" ".join(prompt.split())),
            f"{base.tokens_per_s:.1f}",
            f"{ours.tokens_per_s:.1f}",
            f"{ours.speedup:.2f}" if ours.equal else "differs",
            "yes" if ours.equal else "no",
            f"{Result(tide.method, [ours]).tokens_per_pass:.2f}",
        )
    return table
