"""From tokens to text, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 8  # tokens; no character is spread over more, so what is incomplete then will stay so


class TextPieces:
    """The text of one growing answer.

    Args:
        tokenizer: The model's tokenizer.
        stop: Strings before which the answer ends.

    Attributes:
        stopped: Whether a stop string has come.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self.tokens: list[int] = []
        self.context = 0  # tokens from here on decide how the next one is spelled
        self.spelled = 0  # tokens up to here are part of `held` or of what was handed out
        self.held = ""  # text that may be the beginning of a stop string

    def add(self, token: int) -> str:
        """Take a token; return the text that can go out with it, which may be empty."""
        self.tokens.append(token)
        text = self._spell(self.tokens)
        if text.endswith(REPLACEMENT) and len(self.tokens) - self.spelled < MAX_PENDING:
            return ""  # a character of which more tokens are to come
        return self._hand_out(text)

    def finish(self) -> str:
        """What is left when no token follows."""
        text = self._hand_out(self._spell(self.tokens)) if not self.stopped else ""
        text, self.held = text + self.held, ""
        return text

    def _spell(self, tokens: list[int]) -> str:
        """The text that the tokens from `spelled` on add, as they read after those before."""
        before = self._decode(tokens[self.context : self.spelled])
        return self._decode(tokens[self.context :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

    def _hand_out(self, text: str) -> str:
        self.context, self.spelled = self.spelled, len(self.tokens)
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
