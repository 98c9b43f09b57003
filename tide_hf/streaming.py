"""Answers in the terminal: token by token, and then coloured by the depth that each token used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from .benchmark import Contender, Run, timed_run

FULL_DEPTH_STYLE = "default"
NGRAM_STYLE = "bold green"
EXIT_STYLES = ("bold cyan", "bold blue", "bold magenta", "bold yellow", "bold red")


def stream_answer(
    contender: Contender,
    tokenizer: Any,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    console: Console,
) -> Run:
    """Print an answer token by token; when it is complete, coloured by the depth that each token used.

    Args:
        contender: Who answers.
        tokenizer: The model's tokenizer.
        inputs: The encoded prompt.
        max_new_tokens: Most new tokens.
        console: Where to print. The colours are left out where it is no terminal.

    Returns:
        The run.
    """
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
