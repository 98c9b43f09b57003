"""Answers streamed to the terminal, each token in the colour of its source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from ..common.display import source_colours
from ..common.draft_streamer import DraftStreamer
from ..common.token_sources import kind_of
from ..evaluation.benchmark import DecodingMethod, Run

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters except tab and line feed
REFRESHES_PER_SECOND = 15
MIN_COLUMN = 36  # characters; where the terminal has less for each, answers are shown one under the other
LINES_BESIDE = 5  # of the terminal, which are not the answer's: heading, figures, legend
REJECTED = "strike dim"


def stream_answer(answer: Callable[[BaseStreamer], Run], tokenizer: Any, console: Console) -> Run:
    """Print what `answer` generates with a streamer, token by token.

    On a terminal each token has the colour of its source, and the draft tokens that were just rejected are struck
    through; elsewhere the answer is plain text.
    """
    if not console.is_terminal:
        return _print_plainly(answer, tokenizer, console)
    view = AnswerView(tokenizer, console.height)
    with Live(view, console=console, refresh_per_second=REFRESHES_PER_SECOND):
        run = view.fill(answer)
        view.height = None
    return run


def stream_side_by_side(
    answers: dict[str, Callable[[BaseStreamer], Run]], tokenizer: Any, console: Console
) -> list[Run]:
    """Print what several functions generate, one after the other, each under its name and with its figures.

    On a wide terminal each answer has a column; on a narrow one, and elsewhere, one answer is below the other.
    """
    if not console.is_terminal:
        runs = []
        for name, answer in answers.items():
            console.print(name, markup=False, highlight=False)
            runs.append(_print_plainly(answer, tokenizer, console))
            console.print(Padding(_figures(runs[-1]), (0, 0, 1, 2), expand=False))
        return runs
    is_wide = console.width >= MIN_COLUMN * len(answers)
    height = max(1, console.height // (1 if is_wide else len(answers)) - LINES_BESIDE)
    views = [AnswerView(tokenizer, height, name) for name in answers]
    with Live(_beside(views) if is_wide else Group(*views), console=console, refresh_per_second=REFRESHES_PER_SECOND):
        runs = [view.fill(answer) for view, answer in zip(views, answers.values(), strict=True)]
        for view in views:
            view.height = None
    return runs


class AnswerView:
    """An answer as a renderable of rich, while it grows and when it is complete.

    Args:
        tokenizer: The model's tokenizer.
        height: Number of lines that are shown, the last ones; `None` shows all.
        name: A heading; where there is one, the figures and the legend are shown as well.
    """

    def __init__(self, tokenizer: Any, height: int | None, name: str = "") -> None:
        self.streamer = DraftStreamer(tokenizer)
        self.height, self.name = height, name
        self.run: Run | None = None

    def fill(self, answer: Callable[[BaseStreamer], Run]) -> Run:
        """Generate the answer."""
        self.run = answer(self.streamer)
        return self.run

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.name:
            yield Text(self.name, style="bold")
        pieces, stats = self.streamer.pieces(), self.run.stats if self.run is not None else None
        if stats is not None:  # knows the sources in modes without rounds as well
            pieces = list(zip(self.streamer.texts, stats.sources[0], strict=True))
        text = coloured(pieces, self.streamer.rejected_text)
        yield text if self.height is None else Text("\n").join(text.wrap(console, options.max_width)[-self.height :])
        if self.name and self.run is not None:
            yield Padding(_figures(self.run), (1, 0, 0, 0))


def _beside(views: list[AnswerView]) -> Table:
    grid = Table.grid(expand=True, padding=(0, 3, 0, 0))
    for _ in views:
        grid.add_column(ratio=1)
    grid.add_row(*views)
    return grid


def _print_plainly(answer: Callable[[BaseStreamer], Run], tokenizer: Any, console: Console) -> Run:
    """Print an answer as plain text while it grows, without a word about sources."""
    num_printed = 0

    def show(streamer: DraftStreamer) -> None:
        nonlocal num_printed
        text = "".join(streamer.texts)
        print(text[num_printed:], end="", file=console.file, flush=True)
        num_printed = len(text)

    run = answer(DraftStreamer(tokenizer, show))
    print(file=console.file)
    return run


def coloured(pieces: Iterable[tuple[str, str]], rejected: str = "") -> Text:
    """The texts of tokens in the colours of their sources, then the text of `rejected` draft tokens."""
    pieces = list(pieces)
    colours = source_colours(source for _, source in pieces)
    text = Text()
    for kind, run in groupby(pieces, lambda piece: kind_of(piece[1])):
        text.append(_without_controls("".join(piece for piece, _ in run)), style=colours[kind].terminal)
    text.append(_without_controls(rejected), style=REJECTED)
    return text


def legend(run: Run) -> Text:
    """Legend of the colours, with the number of tokens in each, and of the draft tokens that were rejected."""
    stats: Any = run.stats
    counts = Counter(map(kind_of, stats.sources[0]))
    parts = [
        Text(f"\N{BLACK SQUARE} {kind}: {counts[kind]}", style=colour.terminal)
        for kind, colour in source_colours(counts).items()
    ]
    if stats.drafted > stats.accepted:
        parts.append(Text(f"rejected: {stats.drafted - stats.accepted}", style=REJECTED))
    return Text("   ").join(parts)


def _figures(run: Run) -> Group:
    """Tokens and speed of an answer, and below them the legend of an attached model's."""
    figures = Text(_speed(run), style="dim")
    return Group(figures) if run.stats is None else Group(figures, legend(run))


def _speed(run: Run) -> str:
    tokens = len(run.new_tokens)
    return f"{tokens} tokens, {tokens / (run.seconds - run.warm_up_s):.1f} tokens/s"


def print_figures(run: Run, console: Console) -> None:
    """Print the legend, and the speed and depth of the answer."""
    stats: Any = run.stats
    console.print(Padding.indent(legend(run), 2))
    layers = f"{stats.depth_fraction * stats.num_layers:.1f} of {stats.num_layers} layers per token"
    figures = f"  {stats.mode}: {_speed(run)}, {layers}"
    if run.warm_up_s:
        figures += f"; {run.warm_up_s:.1f} s before that to warm up engine={stats.engine!r}"
    console.print(figures, style="dim", highlight=False)


def answer_record(method: DecodingMethod, tokenizer: Any, run: Run) -> dict[str, Any]:
    """An answer, ready for JSON: method, text, tokens, time and counts."""
    text = tokenizer.decode(run.new_tokens, skip_special_tokens=True)
    return {"mode": method.name, "exit_threshold": method.exit_threshold, "text": text} | run.to_dict()


def _without_controls(text: str) -> str:
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
