"""The text of an answer, cut up into what each token adds to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 8  # tokens; no character is spread over more, so what is incomplete then will stay so


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
        added = self._added()
        if added.endswith(REPLACEMENT) and len(self._tokens) - self._read < MAX_PENDING:
            added = ""  # a character of which more tokens are to come
        else:
            if added:  # behind tokens without text the next one would read as the first of all, without its space
                del self._tokens[: self._read]
            self._read = len(self._tokens)
        self.shown.append(added)
        return added

    def finish(self) -> str:
        """Return what is left where the answer was cut off within a character; it is the last token's."""
        rest = self._added()
        if rest:
            self.shown[-1] += rest
            self._read = len(self._tokens)
        return rest

    def _added(self) -> str:
        """The text that the tokens from `_read` on add, as they read behind those before."""
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._read])) :]

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
