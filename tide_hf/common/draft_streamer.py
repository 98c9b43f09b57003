"""``DraftStreamer``: shows an answer while it is generated, and where its tokens came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .display import TokenTexts, answer_html
from .token_sources import FULL_PASS


class DraftStreamer(BaseStreamer):
    """A streamer for `generate` that knows what wrote each token, and which draft tokens were rejected.

    The self-speculative loop tells it so after each round. From a model without TIDE, and where layers are exited, it
    only gets tokens: `last_exit_stats.sources` has the rest after the call.

    Args:
        tokenizer: The model's tokenizer.
        on_change: Called with this streamer when a token has been added, and when a round has ended.

    Attributes:
        sources: What wrote each token of the rounds that have ended, as in `ExitStats.sources`.
        rejected: The draft tokens that the last round rejected; of a tree, those of the likeliest branch.
    """

    def __init__(self, tokenizer: Any, on_change: Callable[[DraftStreamer], object] = lambda _: None) -> None:
        self.sources: list[str] = []
        self.rejected: list[int] = []
        self._texts = TokenTexts(tokenizer)
        self._on_change = on_change
        self._saw_prompt = False

    @property
    def texts(self) -> list[str]:
        """The text that each token adds."""
        return self._texts.shown

    @property
    def rejected_text(self) -> str:
        """The text of the draft tokens that the last round rejected."""
        return str(self._texts.tokenizer.decode(self.rejected)) if self.rejected else ""

    def pieces(self) -> list[tuple[str, str]]:
        """The text and source of each token; the full pass where the source is not known."""
        return list(zip_longest(self.texts, self.sources[: len(self.texts)], fillvalue=FULL_PASS))

    def put(self, value: Tensor) -> None:
        """Ignore the prompt, which comes first; add the tokens after it."""
        if self._saw_prompt:
            for token in value.flatten().tolist():
                self._texts.add(token)
                self.rejected = []
                self._on_change(self)
        self._saw_prompt = True

    def end_round(self, sources: Sequence[str], rejected: Sequence[int]) -> None:
        """Take the sources of the tokens that one round has added, and the draft tokens that it rejected."""
        self.sources += sources
        self.rejected = list(rejected)
        self._on_change(self)

    def end(self) -> None:
        """Add the text that was still waiting for the rest of a character."""
        self.rejected = []
        self._texts.finish()
        self._on_change(self)

    def to_html(self) -> str:
        """The answer so far as HTML: tokens coloured by source, rejected draft tokens struck through, and a legend."""
        return answer_html(self.pieces(), self.rejected_text)
