"""What `ExitStats` looks like: HTML for notebooks and web pages, and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from ..errors import ConfigurationError, describe
from .depth_colours import depth_colours, depth_name
from .plotting import SIZE, notebook_figure
from .token_texts import token_texts

TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6;color:#1a1a1a;margin:0.5em 0"
CHIP_STYLE = "color:#1a1a1a;border-radius:2px"


def stats_html(stats: Any, tokens: Any = None, tokenizer: Any = None) -> str:
    """A call as HTML; see `ExitStats.to_html`."""
    colours = depth_colours(_all_depths(stats), stats.num_layers)

    def chip(text: str, depth: int) -> str:
        name = depth_name(depth, stats.num_layers)
        style = f"{CHIP_STYLE};background:{colours[depth].css}"
        return f'<span title="{escape(name)}" style="{style}">{escape(text)}</span>'

    lines = "<br>".join(escape(line) for line in stats.headlines())
    answers = [
        "".join(chip(text, depth) for text, depth in zip(texts, depths, strict=True))
        for texts, depths in zip(_texts(stats, tokens, tokenizer), stats.per_token, strict=True)
    ]
    counts = Counter(_all_depths(stats))
    legend = " &ensp; ".join(
        f"{chip('    ', depth)} {escape(depth_name(depth, stats.num_layers))}: {counts[depth]}" for depth in colours
    )
    blocks = [f'<div dir="auto" style="{TEXT_STYLE}">{answer}</div>' for answer in answers]
    legend = f'<div style="white-space:pre-wrap">{legend}</div>'
    return "\n".join(['<div class="tide-exit-stats">', f"<div>{lines}</div>", *blocks, legend, "</div>"])


def stats_figure(stats: Any) -> Any:
    """A call as a plot; see `ExitStats.plot`."""
    width, height = SIZE
    figure = notebook_figure(figsize=(2 * width, height))
    by_depth, by_token = figure.subplots(1, 2, width_ratios=(2, 3))
    draw_depths(by_depth, stats)
    draw_tokens(by_token, stats)
    return figure


def draw_depths(axes: Any, stats: Any) -> None:
    """How many tokens were read from which depth."""
    counts = Counter(_all_depths(stats))
    colours = depth_colours(counts, stats.num_layers)
    names = {0: "n-grams", stats.num_layers: f"{stats.num_layers} (full)"}
    labels = [names.get(depth, str(depth)) for depth in colours]
    bars = axes.bar(
        labels,
        [counts[depth] for depth in colours],
        color=[colour.css for colour in colours.values()],
        edgecolor="grey",
    )
    axes.bar_label(bars, fontsize="small")
    axes.set(title="Where tokens were read", xlabel="exit layer", ylabel="tokens")
    axes.margins(y=0.1)


def draw_tokens(axes: Any, stats: Any) -> None:
    """The depth of each token, one point a token; rows of a batch lie on top of each other, see-through."""
    depths = _all_depths(stats)
    positions = [position for row in stats.per_token for position in range(1, len(row) + 1)]
    colours = depth_colours(depths, stats.num_layers)
    axes.scatter(
        positions,
        depths,
        c=[colours[depth].css for depth in depths],
        edgecolors="grey",
        alpha=max(0.3, 1 / max(1, len(stats.per_token))),
    )
    title = f"{stats.mode}: {stats.depth_fraction:.0%} of the layers executed"
    axes.set(title=title, xlabel="new token", ylabel="layer it was read from", ylim=(-0.7, stats.num_layers + 0.7))
    axes.grid(alpha=0.3)


def _all_depths(stats: Any) -> list[int]:
    return [depth for row in stats.per_token for depth in row]


def _texts(stats: Any, tokens: Any, tokenizer: Any) -> list[list[str]]:
    """The text of each token, row by row; the number of its layer where no text is to be had."""
    if tokens is None:
        return [[f" {depth} " for depth in row] for row in stats.per_token]
    rows = [_plain(row) for row in _rows(tokens)]
    longest = max(map(len, stats.per_token), default=0)
    lengths = [len(depths) for depths in stats.per_token]
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


def _rows(tokens: Any) -> list[Any]:
    """One entry a row, where there may be one row without the list around it."""
    given = _plain(tokens)
    return given if given and not isinstance(given[0], (str, int)) else [given]


def _plain(tokens: Any) -> list[Any]:
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(tokens, (list, tuple)):
        raise _refused(
            "these are no tokens", got=f"a {type(tokens).__name__}", expected="a list or a tensor of tokens, or of rows"
        )
    return list(tokens)


def _refused(problem: str, *, got: str, expected: str) -> ConfigurationError:
    do = "Pass output[:, prompt_length:] and tokenizer=..., or leave the tokens out."
    return ConfigurationError(describe(problem, got=got, expected=expected, do=do))
