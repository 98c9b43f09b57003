"""Names of what writes tokens: the sources of drafts, and the full-depth pass."""

from __future__ import annotations

from collections.abc import Iterable

FULL_PASS = "full pass"
DRAFT_HEAD = "draft head"
NGRAM = "n-gram"
EARLIER_ANSWER = "earlier answer"
SUCCESSOR = "successor"  # a token that earlier passes gave after the row's last one


def ngram_source(length: int) -> str:
    """The source of drafts that followed the row's last `length` tokens earlier in the row."""
    return f"{length}-gram"


def remembered_source(length: int) -> str:
    """The source of drafts that followed the row's last `length` tokens in an earlier answer."""
    return f"remembered {length}-gram"


def head_source(exit_layer: int) -> str:
    """The source of drafts, or of tokens that exited, that the head at an exit layer wrote; 0: the draft head."""
    return f"exit layer {exit_layer}" if exit_layer else DRAFT_HEAD


def kind_of(source: str) -> str:
    """The kind of a source: n-grams of all lengths are of one kind, any other source is its own."""
    if source.startswith("remembered "):
        return EARLIER_ANSWER
    return NGRAM if source.endswith("-gram") else source


def sources_of_depths(per_token: Iterable[Iterable[int]], num_layers: int) -> list[list[str]]:
    """For each row, the source of each token, where exit heads alone write tokens before the full-depth pass."""
    return [[FULL_PASS if layer == num_layers else head_source(layer) for layer in row] for row in per_token]
