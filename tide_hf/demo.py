"""``tide-hf demo``: shows how deep each token of an answer ran, then measures every mode against plain ``generate``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from .benchmark import Contender, Result, Run, compare, count_runs, encode_prompt, tide_contenders, timed_run
from .configuration_tide import MODES
from .demo_model import DEFAULT_MODEL, load_demo_model
from .errors import ConfigurationError, describe
from .modeling_tide import TIDERouters
from .provenance import provenance

PROMPTS = (
    "Why do the leaves of many trees turn yellow and red in autumn?",
    "Copy this note word for word, but write Thursday instead of Tuesday:\n\n"
    "Dear neighbours, on Tuesday the water in our street will be turned off from nine in the morning until noon. "
    "Please fill a kettle and a bucket before nine on Tuesday, and let the tap run for a minute after noon. "
    "If the water is not back by one on Tuesday, call the office at the town hall. Kind regards, the town hall.",
    "Write a Python function that takes a list of numbers and returns the largest, the smallest and the mean.",
)
FULL_DEPTH_STYLE = "default"
NGRAM_STYLE = "bold green"
EXIT_STYLES = ("bold cyan", "bold blue", "bold magenta", "bold yellow", "bold red")


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
        _check_writable(options.json_file)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_demo_model(options.model, dtype=options.dtype, console=console)
    routers_name = options.routers or shipped_routers(options.model)
    routers = TIDERouters.from_pretrained(routers_name) if routers_name is not None else None
    contenders = tide_contenders(model, routers, _modes(options, routers), exit_threshold=options.exit_threshold)
    record = provenance(model) | {"routers": None if routers is None else Path(routers_name).name}  # type: ignore[arg-type]
    _print_setting(record, console)
    inputs = [encode_prompt(tokenizer, prompt) for prompt in options.prompts]
    for prompt, encoded in zip(options.prompts, inputs, strict=True):
        stream_answer(contenders[1], tokenizer, prompt, encoded, options.max_new_tokens, console)
    results = _measure(contenders, inputs, options, console)
    console.print(comparison_table(results, model.config.get_text_config().num_hidden_layers))
    for note in notes(results, options.max_new_tokens, options.repeats):
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
    if options.json_file is not None:
        settings = {name: getattr(options, name) for name in ("max_new_tokens", "repeats", "prompts")}
        record |= settings | {"results": [result.to_dict() for result in results]}
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


def stream_answer(
    contender: Contender,
    tokenizer: Any,
    prompt: str,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    console: Console,
) -> Run:
    """Print an answer token by token; when it is complete, coloured by the depth that each token used.

    Args:
        contender: Who answers.
        tokenizer: The model's tokenizer.
        prompt: The user's message, to be shown.
        inputs: The same, encoded.
        max_new_tokens: Most new tokens.
        console: Where to print. The colours are left out where it is no terminal.

    Returns:
        The run.
    """
    console.print()
    console.print(Padding(Text(prompt, style="italic"), (0, 0, 0, 2)))
    if console.is_terminal:
        with Live(console=console, refresh_per_second=15) as live:
            streamer = TokenStreamer(lambda tokens: live.update(Text("".join(token_texts(tokenizer, tokens)))))
            run = timed_run(contender, inputs, max_new_tokens, streamer)
            live.update(coloured(token_texts(tokenizer, run.new_tokens), run))
    else:
        run = timed_run(contender, inputs, max_new_tokens, TokenStreamer(_plain_printer(tokenizer, console)))
        console.print()
    console.print(legend(run))
    return run


class TokenStreamer(BaseStreamer):
    """Calls back with all new tokens so far whenever one more was accepted.

    Args:
        on_tokens: The callback.
    """

    def __init__(self, on_tokens: Callable[[list[int]], None]) -> None:
        self.on_tokens = on_tokens
        self.tokens: list[int] | None = None  # None until the prompt has come by

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and after it token by token."""
        if self.tokens is None:
            self.tokens = []
            return
        self.tokens.extend(value.flatten().tolist())
        self.on_tokens(self.tokens)

    def end(self) -> None:
        """Nothing is left to do."""


def _plain_printer(tokenizer: Any, console: Console) -> Callable[[list[int]], None]:
    printed = 0

    def print_new(tokens: list[int]) -> None:
        nonlocal printed
        texts = token_texts(tokenizer, tokens)
        console.print("".join(texts[printed:]), end="", markup=False, highlight=False, soft_wrap=True)
        printed = len(texts)

    return print_new


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds. A character spread over several tokens is the last one's."""
    texts: list[str] = []
    shown = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        complete = not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(shown)
        texts.append(text[len(shown) :] if complete else "")
        shown = text if complete else shown
    return texts


def coloured(texts: Sequence[str], run: Run) -> Text:
    """The answer, each token in the colour of the depth it was read from."""
    text = Text()
    for piece, depth in zip(texts, _depths(run), strict=True):
        text.append(piece, style=_style(depth, run))
    return text


def legend(run: Run) -> Text:
    """What the colours mean, with the number of tokens of each."""
    text = Text("  ")
    for depth, count in sorted(Counter(_depths(run)).items()):
        what = "n-gram draft confirmed" if depth == 0 else f"exit layer {depth}"
        if run.stats is None or depth == run.stats.num_layers:
            what = f"full depth ({depth} layers)"
        text.append(f"\N{BLACK SQUARE} {what}: {count}   ", style=_style(depth, run))
    text.rstrip()
    return text


def _depths(run: Run) -> list[int]:
    return run.stats.per_token[0] if run.stats is not None else [-1] * len(run.new_tokens)


def _style(depth: int, run: Run) -> str:
    if depth == 0:
        return NGRAM_STYLE
    if run.stats is None or depth == run.stats.num_layers:
        return FULL_DEPTH_STYLE
    exits = [layer for layer in run.stats.exits_per_layer if layer != 0]
    return EXIT_STYLES[exits.index(depth) % len(EXIT_STYLES)]


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
    table = Table(title=f"{len(results[0].prompts)} prompts, greedy")
    table.add_column("decoding")
    for column in ("tokens/s", "speed-up", "layers per token", "drafts accepted", "equal tokens"):
        table.add_column(column, justify="right")
    for position, result in enumerate(results):
        layers, acceptance = result.layers_per_token, result.acceptance_rate
        table.add_row(
            result.contender.name,
            f"{result.tokens_per_s:.1f}",
            "1.00" if position == 0 else _speedup(result),
            f"{num_layers if layers is None else layers:.1f} of {num_layers}",
            "" if acceptance is None else f"{acceptance:.0%}",
            "" if position == 0 else _equality(result),
        )
    return table


def _speedup(result: Result) -> str:
    if result.speedup is None:
        return "differs"
    per_prompt = [prompt.speedup for prompt in result.prompts]
    return f"{result.speedup:.2f} ({min(per_prompt):.2f} to {max(per_prompt):.2f})"


def _equality(result: Result) -> str:
    if result.num_equal == len(result.prompts):
        return "yes, all"
    return f"{result.num_equal} of {len(result.prompts)} (same for the first {result.same_start:.0%})"


def notes(results: Sequence[Result], max_new_tokens: int, repeats: int) -> list[str]:
    """What has to be known to read the table."""
    lines = [
        f"Tokens per second: at most {max_new_tokens} tokens a prompt, median of {repeats} interleaved runs after one "
        "that is not counted, the prompt's own pass included. Speed-up over generate of the same weights, in brackets "
        "by prompt."
    ]
    for result in results:
        if result.contender.exit_threshold is not None:
            lines.append(
                f"{result.contender.name}: approximate, exit_threshold {result.contender.exit_threshold:g}."
                + (" All layers run: no speed is to be expected." if result.contender.name == "post_hoc" else "")
            )
        elif result.contender.lossless and result.speedup is None:
            lines.append(
                f"{result.contender.name}: the tokens differ from generate's, so no speed-up is given. In half precision "
                "near-ties can be decided otherwise by a wider pass."
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


def _check_writable(json_file: Path) -> None:
    """Find out before minutes of measuring, not after."""
    if json_file.is_dir() or not json_file.parent.is_dir():
        raise ConfigurationError(
            describe(
                "the figures cannot be written there",
                got=f"--json {json_file}",
                expected="a file in a folder that exists",
                do="Make the folder, or name another file.",
            )
        )
