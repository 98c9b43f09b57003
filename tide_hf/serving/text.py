"""From tokens to text, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import Any

from ..display.token_texts import TokenTexts


class TextPieces:
    """The text of one growing answer.

    Args:
        tokenizer: The model's tokenizer.
        stop: Strings before which the answer ends.

    Attributes:
        stopped: Whether a stop string has come.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.texts = TokenTexts(tokenizer)
        self.stop = stop
        self.stopped = False
        self.held = ""  # text that may be the beginning of a stop string

    def add(self, token: int) -> str:
        """Take a token; return the text that can go out with it, which may be empty."""
        return self._hand_out(self.texts.add(token))

    def finish(self) -> str:
        """What is left when no token follows."""
        text = self._hand_out(self.texts.finish()) if not self.stopped else ""
        text, self.held = text + self.held, ""
        return text

    def _hand_out(self, text: str) -> str:
        self.held += text
        found = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self.held = self.held[: min(found)], ""
            return text
        keep = max((_overlap(self.held, stop) for stop in self.stop), default=0)
        end = len(self.held) - keep
        text, self.held = self.held[:end], self.held[end:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
