"""Answers streamed to the terminal, then coloured by the depth of each token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from ..common.display import TokenTexts, depth_colours, depth_name
from ..evaluation.benchmark import DecodingMethod, Run

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters except tab and line feed


def stream_answer(answer: Callable[[BaseStreamer], Run], tokenizer: Any, console: Console) -> Run:
    """Print what `answer` generates with a streamer, token by token.

    On a terminal the complete answer is coloured by the depth of each token; elsewhere it is plain text.
    """
    texts = TokenTexts(tokenizer)
    if not console.is_terminal:
        run = answer(TokenStreamer(lambda token: print(texts.add(token), end="", file=console.file, flush=True)))
        print(texts.finish(), file=console.file)
        return run
    with Live(console=console, refresh_per_second=15) as live:

        def show(token: int) -> None:
            texts.add(token)
            live.update(_Tail(Text(_without_controls("".join(texts.shown)))))

        run = answer(TokenStreamer(show))
        texts.finish()
        live.update(coloured(texts.shown, run))
    return run


class TokenStreamer(BaseStreamer):
    """A streamer that calls `on_token` with each new token."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self.on_token = on_token
        self.saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Ignore the prompt, which comes first; call back with each token after it."""
        if self.saw_prompt:
            for token in value.flatten().tolist():
                self.on_token(token)
        self.saw_prompt = True

    def end(self) -> None:
        """Do nothing at the end of the answer."""


class _Tail:
    """The last lines of a text, as many as fit the terminal."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n").join(self.text.wrap(console, options.max_width)[-console.height :])


def coloured(texts: Sequence[str], run: Run) -> Text:
    """The answer of an attached model, each token in the colour of its depth."""
    depths, num_layers = _depths(run)
    colours = depth_colours(depths, num_layers)
    text = Text()
    for piece, depth in zip(texts, depths, strict=True):
        text.append(_without_controls(piece), style=colours[depth].terminal)
    return text


def legend(run: Run) -> Text:
    """Legend of the colours, with the number of tokens in each colour."""
    depths, num_layers = _depths(run)
    counts = Counter(depths)
    text = Text("  ")
    for depth, colour in depth_colours(depths, num_layers).items():
        name = depth_name(depth, num_layers)
        text.append(f"\N{BLACK SQUARE} {name}: {counts[depth]}   ", style=colour.terminal)
    text.rstrip()
    return text


def print_figures(run: Run, console: Console) -> None:
    """Print the legend, and the speed and depth of the answer."""
    stats: Any = run.stats
    tokens = len(run.new_tokens)
    console.print(legend(run))
    speed = f"{tokens / (run.seconds - stats.warm_up_s):.1f} tokens/s"
    layers = f"{stats.depth_fraction * stats.num_layers:.1f} of {stats.num_layers} layers per token"
    figures = f"  {stats.mode}: {tokens} tokens, {speed}, {layers}"
    if stats.warm_up_s:
        figures += f"; {stats.warm_up_s:.1f} s before that to warm up engine={stats.engine!r}"
    console.print(figures, style="dim", highlight=False)


def answer_record(method: DecodingMethod, tokenizer: Any, run: Run) -> dict[str, Any]:
    """An answer, ready for JSON: method, text, tokens, time and counts."""
    text = tokenizer.decode(run.new_tokens, skip_special_tokens=True)
    return {"mode": method.name, "exit_threshold": method.exit_threshold, "text": text} | run.to_dict()


def _without_controls(text: str) -> str:
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _depths(run: Run) -> tuple[list[int], int]:
    stats: Any = run.stats
    return stats.per_token[0], stats.num_layers
