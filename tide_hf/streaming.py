"""Answers in the terminal: token by token, and then coloured by the depth that each token used."""

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

from .benchmark import Contender, Run

FULL_DEPTH_STYLE = "default"
NGRAM_STYLE = "bold green"
EXIT_STYLES = ("bold cyan", "bold blue", "bold magenta", "bold yellow", "bold red")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


def stream_answer(answer: Callable[[BaseStreamer], Run], tokenizer: Any, console: Console) -> Run:
    """Print an answer token by token; when it is complete, coloured by the depth that each token used.

    Args:
        answer: Generates with the streamer that it is given.
        tokenizer: The model's tokenizer.
        console: Where to print. Where it is no terminal it gets the plain text, and a line break at its end.

    Returns:
        The run.
    """
    texts = TokenTexts(tokenizer)
    if not console.is_terminal:
        run = answer(TokenStreamer(lambda token: print(texts.add(token), end="", file=console.file, flush=True)))
        print(texts.finish(), file=console.file)
        return run
    with Live(console=console, refresh_per_second=15) as live:

        def show(token: int) -> None:
            texts.add(token)
            live.update(_Tail(Text(_harmless("".join(texts.shown)))))

        run = answer(TokenStreamer(show))
        texts.finish()
        live.update(coloured(texts.shown, run))
    return run


class TokenStreamer(BaseStreamer):
    """Calls back with each new token when it was accepted.

    Args:
        on_token: The callback.
    """

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self.on_token = on_token
        self.saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and after it token by token."""
        if not self.saw_prompt:
            self.saw_prompt = True
            return
        for token in value.flatten().tolist():
            self.on_token(token)

    def end(self) -> None:
        """Nothing is left to do."""


class TokenTexts:
    """The text that each token of an answer adds. A character spread over several tokens is the last one's.

    Args:
        tokenizer: The model's tokenizer.

    Attributes:
        shown: The texts so far, one a token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.shown: list[str] = []
        self._tokens: list[int] = []  # the last ones; those before cannot change how these read
        self._read = 0  # how many of them have been shown

    def add(self, token: int) -> str:
        """Take the next token; return what it adds."""
        self._tokens.append(token)
        before, text = (self._decode(self._tokens[:end]) for end in (self._read, len(self._tokens)))
        complete = not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(before)
        self.shown.append(text[len(before) :] if complete else "")
        if complete:
            self._tokens = self._tokens[self._read :]
            self._read = len(self._tokens)
        return self.shown[-1]

    def finish(self) -> str:
        """Return what is left where the answer was cut off within a character; it is the last token's."""
        rest = self._decode(self._tokens)[len(self._decode(self._tokens[: self._read])) :]
        if rest:
            self.shown[-1] += rest
        return rest

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class _Tail:
    """The last lines of a text, as many as the terminal has."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n").join(self.text.wrap(console, options.max_width)[-console.height :])


def coloured(texts: Sequence[str], run: Run) -> Text:
    """The answer, each token in the colour of the depth it was read from."""
    text = Text()
    for piece, depth in zip(texts, _depths(run), strict=True):
        text.append(_harmless(piece), style=_style(depth, run))
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


def print_figures(run: Run, console: Console) -> None:
    """Print the legend, and how fast and deep the answer was."""
    console.print(legend(run))
    if run.stats is not None:
        layers = f"{run.stats.depth_fraction * run.stats.num_layers:.1f} of {run.stats.num_layers} layers per token"
        figures = f"  {run.stats.mode}: {len(run.new_tokens)} tokens, {run.tokens_per_s:.1f} tokens/s, {layers}"
        console.print(figures, style="dim", highlight=False)


def answer_record(contender: Contender, tokenizer: Any, run: Run) -> dict[str, Any]:
    """An answer, ready for JSON: how it was decoded, its text and tokens, its time and counts."""
    text = tokenizer.decode(run.new_tokens, skip_special_tokens=True)
    return {"mode": contender.name, "exit_threshold": contender.exit_threshold, "text": text} | run.to_dict()


def _harmless(text: str) -> str:
    """The text without what a terminal would obey."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _depths(run: Run) -> list[int]:
    return run.stats.per_token[0] if run.stats is not None else [-1] * len(run.new_tokens)


def _style(depth: int, run: Run) -> str:
    if depth == 0:
        return NGRAM_STYLE
    if run.stats is None or depth == run.stats.num_layers:
        return FULL_DEPTH_STYLE
    exits = [layer for layer in run.stats.exits_per_layer if layer != 0]
    return EXIT_STYLES[exits.index(depth) % len(EXIT_STYLES)]
