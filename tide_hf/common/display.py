"""Display of an answer: the text, source and depth of each token, as HTML for notebooks and as a plot.

Terminal, HTML and plots share one scale of colours. Plots need matplotlib: `pip install tide-hf[plots]`.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from .errors import ConfigurationError, MissingPackageError
from .token_sources import DRAFT_HEAD, EARLIER_ANSWER, FULL_PASS, NGRAM, SUCCESSOR, kind_of

SIZE = (5.6, 3.6)  # width and height of a plot, in inches
DOTS_PER_INCH = 120
TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6;color:#1a1a1a;margin:0.5em 0"
CHIP_STYLE = "color:#1a1a1a;border-radius:2px"
REJECTED_STYLE = "opacity:0.6"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 8  # maximum number of tokens that wait for the rest of a character; no character spans more


@dataclass(frozen=True)
class Colour:
    """A style of `rich` for terminal text, and a CSS background colour for dark text."""

    terminal: str
    css: str


COLOURS = {
    NGRAM: Colour("bold green", "#a5dfa9"),
    EARLIER_ANSWER: Colour("bold yellow", "#f3dc83"),
    SUCCESSOR: Colour("bold magenta", "#e3b5e8"),
    DRAFT_HEAD: Colour("bold cyan", "#8fdbe6"),
    FULL_PASS: Colour("default", "#e3e3e3"),
}
OTHERS = (  # exit layers, and sources of drafters that a user has written
    Colour("bold blue", "#a9c1f7"),
    Colour("bold magenta", "#e2b3ee"),
    Colour("bold red", "#f6aaa2"),
    Colour("bold bright_yellow", "#f7c9a0"),
    Colour("bold bright_blue", "#b9e0d2"),
)


def source_colours(sources: Iterable[str]) -> dict[str, Colour]:
    """The colour of each kind of source in `sources`, the full pass last; those of exit layers repeat after five."""
    kinds = {kind_of(source) for source in sources}
    others = sorted(kinds - COLOURS.keys(), key=lambda kind: (len(kind), kind))  # exit layer 8 before exit layer 16
    scale = {kind: COLOURS[kind] for kind in (NGRAM, EARLIER_ANSWER, SUCCESSOR, DRAFT_HEAD)}
    scale |= {kind: OTHERS[position % len(OTHERS)] for position, kind in enumerate(others)}
    scale[FULL_PASS] = COLOURS[FULL_PASS]
    return {kind: colour for kind, colour in scale.items() if kind in kinds}


class TokenTexts:
    """The text that each token adds to an answer. A character that spans several tokens belongs to the last of them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.shown: list[str] = []  # the texts so far, one per token
        self._tokens: list[int] = []  # the latest tokens; earlier tokens do not affect how these decode
        self._num_shown = 0  # number of `_tokens` whose text is in `shown`

    def add(self, token: int) -> str:
        """Take the next token; return the text that it adds."""
        self._tokens.append(token)
        added = self._pending_text()
        if added.endswith(REPLACEMENT) and len(self._tokens) - self._num_shown < MAX_PENDING:
            added = ""  # the rest of the character is in the next tokens
        else:
            if added:  # else keep the context: a token that decodes first would lose its leading space
                del self._tokens[: self._num_shown]
            self._num_shown = len(self._tokens)
        self.shown.append(added)
        return added

    def finish(self) -> str:
        """Return the text that is still pending when the answer ends, and add it to the last token's text."""
        rest = self._pending_text()
        if rest:
            self.shown[-1] += rest
            self._num_shown = len(self._tokens)
        return rest

    def _pending_text(self) -> str:
        """The text of the tokens that are not yet shown, decoded after the tokens that are shown."""
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._num_shown])) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def token_texts(tokens: Iterable[int], tokenizer: Any) -> list[str]:
    """For each token of a complete answer, the text that the token adds."""
    texts = TokenTexts(tokenizer)
    for token in tokens:
        texts.add(int(token))
    texts.finish()
    return texts.shown


def stats_html(stats: Any, tokens: Any = None, tokenizer: Any = None) -> str:
    """A call of `generate` as HTML; see `ExitStats.to_html`."""
    lines = "<br>".join(escape(line) for line in stats.headlines())
    rows = zip(_texts(stats, tokens, tokenizer), stats.sources, strict=True)
    answers = _answers_html([list(zip(texts, sources, strict=True)) for texts, sources in rows])
    return "\n".join(['<div class="tide-exit-stats">', f"<div>{lines}</div>", answers, "</div>"])


def answer_html(pieces: Sequence[tuple[str, str]], rejected: str = "") -> str:
    """The text and source of each token as HTML, then the text of `rejected` draft tokens, and a legend."""
    return f'<div class="tide-exit-stats">\n{_answers_html([pieces], rejected)}\n</div>'


def _answers_html(answers: Sequence[Sequence[tuple[str, str]]], rejected: str = "") -> str:
    """Each row's pieces as a block of coloured text, then the legend of all."""
    counts = Counter(kind_of(source) for pieces in answers for _, source in pieces)
    colours = source_colours(counts)

    def chip(text: str, source: str) -> str:
        style = f"{CHIP_STYLE};background:{colours[kind_of(source)].css}"
        return f'<span title="{escape(source)}" style="{style}">{escape(text)}</span>'

    struck = f'<s style="{REJECTED_STYLE}">{escape(rejected)}</s>' if rejected else ""
    blocks = ["".join(chip(text, source) for text, source in pieces) + struck for pieces in answers]
    legend = " &ensp; ".join(f"{chip('    ', kind)} {escape(kind)}: {counts[kind]}" for kind in colours)
    lines = [f'<div dir="auto" style="{TEXT_STYLE}">{block}</div>' for block in blocks]
    return "\n".join([*lines, f'<div style="white-space:pre-wrap">{legend}</div>'])


def figure_maker() -> Any:
    """Import matplotlib's `Figure`, or raise [`MissingPackageError`]."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # not pyplot, which keeps global state
    except ImportError as error:
        raise MissingPackageError(
            "plots cannot be drawn",
            got="no matplotlib",
            expected="matplotlib 3.8 or later",
            do="Run: pip install tide-hf[plots]",
        ) from error
    return Figure


def stats_figure(stats: Any) -> Any:
    """A call of `generate` as a plot; see `ExitStats.plot`."""
    width, height = SIZE
    figure = figure_maker()(dpi=DOTS_PER_INCH, layout="constrained", figsize=(2 * width, height))
    figure._repr_png_ = partial(_png, figure)  # lets notebooks show a figure made without pyplot
    by_source, by_token = figure.subplots(1, 2, width_ratios=(2, 3))
    kinds = [kind_of(source) for row in stats.sources for source in row]
    counts, colours = Counter(kinds), source_colours(kinds)
    bars = by_source.barh(
        list(colours),
        [counts[kind] for kind in colours],
        color=[colour.css for colour in colours.values()],
        edgecolor="grey",
    )
    by_source.bar_label(bars, fontsize="small")
    by_source.set(title="Tokens by source", xlabel="tokens")
    by_source.margins(x=0.15)
    by_token.scatter(
        [position for row in stats.per_token for position in range(1, len(row) + 1)],
        [depth for row in stats.per_token for depth in row],
        c=[colours[kind].css for kind in kinds],
        edgecolors="grey",
        alpha=max(0.3, 1 / max(1, len(stats.per_token))),  # transparent, since the rows of a batch overlap
    )
    title = f"{stats.mode}: {stats.depth_fraction:.0%} of the layers executed"
    by_token.set(title=title, xlabel="new token", ylabel="exit layer", ylim=(-0.7, stats.num_layers + 0.7))
    by_token.grid(alpha=0.3)
    return figure


def _png(figure: Any) -> bytes:
    figure.savefig(file := io.BytesIO(), format="png")
    return file.getvalue()


def _texts(stats: Any, tokens: Any, tokenizer: Any) -> list[list[str]]:
    """The text of each token, row by row; if `tokens` is `None`, the depth of each token instead."""
    if tokens is None:
        return [[f" {depth} " for depth in row] for row in stats.per_token]
    rows = _as_list(tokens)
    if not rows or isinstance(rows[0], (str, int)):  # a single row, not in a list of rows
        rows = [rows]
    rows = [_as_list(row) for row in rows]
    lengths = [len(depths) for depths in stats.per_token]
    longest = max(lengths, default=0)
    if len(rows) != len(lengths) or any(
        len(row) not in (length, longest) for row, length in zip(rows, lengths, strict=True)
    ):
        raise _refused(
            "the tokens are not those of this call",
            got=f"rows of {', '.join(str(len(row)) for row in rows)}",
            expected=f"rows of {', '.join(map(str, lengths))}, padded to {longest} or not",
        )
    return [_row_texts(row[:length], tokenizer) for row, length in zip(rows, lengths, strict=True)]


def _row_texts(row: Sequence[Any], tokenizer: Any) -> list[str]:
    if all(isinstance(token, str) for token in row):
        return list(row)
    if tokenizer is None or not all(isinstance(token, int) for token in row):
        kinds = sorted({type(token).__name__ for token in row})
        raise _refused(
            "the text of the tokens is not known",
            got=f"tokens of type {' and '.join(kinds)}, {'no' if tokenizer is None else 'a'} tokenizer",
            expected="texts, or token ids and the model's tokenizer",
        )
    return token_texts(row, tokenizer)


def _as_list(tokens: Any) -> list[Any]:
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(tokens, (list, tuple)):
        expected = "a list or a tensor of tokens, or of rows"
        raise _refused("these are not tokens", got=f"a {type(tokens).__name__}", expected=expected)
    return list(tokens)


def _refused(problem: str, *, got: str, expected: str) -> ConfigurationError:
    do = "Pass output[:, prompt_length:] and tokenizer=..., or no tokens."
    return ConfigurationError(problem, got=got, expected=expected, do=do)
