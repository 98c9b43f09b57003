"""``tide-hf demo``: plain ``generate`` and TIDE answer the same prompts side by side, and a table compares them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from time import perf_counter

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
    compare_with_float32,
    forget_answers,
    run_each,
    runs_note,
    tide_methods,
    timed_run,
    without_drafts,
)
from .benchmark import encode_prompts, setting
from .demo_model import load_demo_model
from .model_arguments import load
from .prompts import PROMPTS, given_prompts
from .streaming import stream_side_by_side

NAMES = ("plain generate", "with TIDE")
UNTIMED_TOKENS = 8  # of each, before the first prompt, since a first call allocates buffers
REPEATS = 3  # of which the table shows the median; only the first run is streamed
MAX_SECONDS = 45  # with a loaded model, after which no built-in prompt or repeat begins: the table does not wait long
EQUAL, AS_FLOAT32 = "tokens\nequal", "as float32\nplain/TIDE"  # the latter below float32
COLUMNS = ("plain\ntokens/s", "TIDE\ntokens/s", "\nspeed", "by\nengine", "by\ndrafts", EQUAL, "tokens/\npass")
PROMPT_WIDTH = 26  # characters of a prompt in the table, which fits 80 columns


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    prompts = given_prompts(args.prompt) or list(PROMPTS)
    console = Console(stderr=args.json)
    waits = Console(stderr=True)
    waits.print(f"Loading {args.model} ...", markup=False, highlight=False, soft_wrap=True)
    loaded = load(args, load_demo_model)
    inputs = encode_prompts(loaded, prompts, args)
    start = perf_counter()
    with waiting(waits, "Attaching TIDE"):  # on a CPU, builds kernels once a machine
        plain, tide = tide_methods(loaded.model, loaded.routers, ["self_speculative"])
    tide.model.tide_warm_up()  # on a CPU, converts weights now instead of within an answer
    methods = [plain, tide, without_drafts(tide)]
    with waiting(waits, "Running each for a moment"):
        for method in methods:
            timed_run(method, inputs[0], UNTIMED_TOKENS)
    record = setting(loaded, EAGER, console)
    results = [Result(method, []) for method in methods]
    for prompt, encoded in zip(prompts, inputs, strict=True):
        if results[0].prompts and not args.prompt and perf_counter() - start > MAX_SECONDS:
            console.print("The other prompts are left out, since this machine takes long.", style="dim")
            break
        console.print(Padding(Text(prompt, style="italic"), (1, 0), expand=False))
        forget_answers(tide.model)
        answers = [partial(timed_run, method, encoded, args.max_new_tokens) for method in methods]
        runs = stream_side_by_side(dict(zip(NAMES, answers, strict=False)), loaded.tokenizer, console)
        for result, one in zip(results, [*runs, answers[-1]()], strict=True):
            result.prompts.append(PromptResult([one]))
    prompts = prompts[: len(results[0].prompts)]
    for _ in range(REPEATS - 1):
        if perf_counter() - start < MAX_SECONDS:
            with waiting(waits, "Running all once more, for a median"):
                run_each(results, inputs[: len(prompts)], args.max_new_tokens)
    for result in results:
        compare_with(results[0], result)
    with waiting(waits, "Answering in float32, to compare"):
        compare_with_float32(results, inputs[: len(prompts)], args.max_new_tokens)
    _print_table(prompts, results, args, console)
    if args.json:
        limit = {"max_new_tokens": args.max_new_tokens}
        figures = {"prompts": prompts, "results": [result.to_dict() for result in results]}
        print(json.dumps(record | limit | figures, indent=2))


def _print_table(prompts: Sequence[str], results: Sequence[Result], args: argparse.Namespace, console: Console) -> None:
    """Print how fast TIDE was beside plain `generate`, what the figures are, and where to go on."""
    console.print(Padding(comparison_table(prompts, results), (1, 0), expand=False))
    note = (
        f"At most {args.max_new_tokens} new tokens, greedy, prefill included; {runs_note(results)}, in this process. "
        "Speed is what the engine gains (kernels and the layout of weights, measured without drafts) times what drafts "
        "gain, by more tokens a pass."
    )
    if results[0].num_as_float32 is not None:
        note += " As float32: whether an answer is that of the same weights loaded in float32, by plain generate."
    console.print(note, style="dim", highlight=False)
    console.print(
        f"At length, with all modes and transformers' own methods: tide-hf benchmark {args.model}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def comparison_table(prompts: Sequence[str], results: Sequence[Result]) -> Table:
    """Speed and tokens of TIDE beside plain `generate`, and TIDE's engine alone: a row per prompt, and one for all."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, show_footer=len(prompts) > 1)
    knows_float32 = results[0].num_as_float32 is not None
    table.add_column("\nprompt", "all", no_wrap=True, max_width=PROMPT_WIDTH - 4 * knows_float32)
    headings = [AS_FLOAT32 if knows_float32 and heading == EQUAL else heading for heading in COLUMNS]
    for heading, footer in zip(headings, _cells(*results), strict=True):
        table.add_column(heading, footer, justify="right", no_wrap=True)
    for position, prompt in enumerate(prompts):
        parts = [Result(result.method, [result.prompts[position]]) for result in results]
        table.add_row(Text(" ".join(prompt.split())), *_cells(*parts))
    return table


def _cells(plain: Result, tide: Result, engine: Result) -> list[str]:
    """The cells of a row: figures of one prompt, or of all."""
    count = len(tide.prompts)
    ratios = [tide.tokens_per_s / plain.tokens_per_s, engine.tokens_per_s / plain.tokens_per_s]
    factors = [f"{ratio:.2f}" for ratio in (*ratios, ratios[0] / ratios[1])]
    equal = "yes" if tide.num_equal == count else f"{tide.num_equal} of {count}"
    if plain.num_as_float32 is not None:
        both = plain.num_as_float32, tide.num_as_float32
        equal = "/".join("yes" if one else "no" for one in both) if count == 1 else f"{both[0]}/{both[1]} of {count}"
    rates = [f"{result.tokens_per_s:.1f}" for result in (plain, tide)]
    return [*rates, *factors, equal, f"{tide.tokens_per_pass:.2f}"]
