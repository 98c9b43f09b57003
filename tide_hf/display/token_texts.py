"""The text of an answer, cut up into what each token adds to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


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


def token_texts(tokens: Iterable[int], tokenizer: Any) -> list[str]:
    """The text that each token of a whole answer adds.

    Args:
        tokens: The answer's tokens.
        tokenizer: The model's tokenizer.
    """
    texts = TokenTexts(tokenizer)
    for token in tokens:
        texts.add(int(token))
    texts.finish()
    return texts.shown
