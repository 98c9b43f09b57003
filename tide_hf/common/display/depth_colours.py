"""The colours and names of depths, one scale for terminal, HTML and plots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """One colour of the scale.

    Attributes:
        terminal: A style of rich, for text.
        css: A background for dark text.
    """

    terminal: str
    css: str


FULL_DEPTH = Colour("default", "#e3e3e3")
NGRAM = Colour("bold green", "#a5dfa9")
EXITS = (
    Colour("bold cyan", "#8fdbe6"),
    Colour("bold blue", "#a9c1f7"),
    Colour("bold magenta", "#e2b3ee"),
    Colour("bold yellow", "#f3dc83"),
    Colour("bold red", "#f6aaa2"),
)


def depth_colours(depths: Iterable[int], num_layers: int) -> dict[int, Colour]:
    """Give every depth of an answer its colour.

    Args:
        depths: What tokens were read from, as in `ExitStats.per_token`; repeats do no harm.
        num_layers: Decoder layers of the base model.

    Returns:
        The colours by depth, shallowest first. With more than five exit layers colours come round again.
    """
    different = sorted(set(depths))
    exits = [depth for depth in different if depth not in (0, num_layers)]
    scale = {0: NGRAM, num_layers: FULL_DEPTH}
    scale |= {depth: EXITS[position % len(EXITS)] for position, depth in enumerate(exits)}
    return {depth: scale[depth] for depth in different}


def depth_name(depth: int, num_layers: int) -> str:
    """What a depth is called in a legend."""
    if depth == num_layers:
        return f"full depth ({num_layers} layers)"
    return "n-gram draft confirmed" if depth == 0 else f"exit layer {depth}"
