"""One request on its way through the model."""

from __future__ import annotations

from collections.abc import Callable

from .protocol import ChatRequest, Delta, Event, Finished, Refused
from .text import TextPieces

SHUTTING_DOWN = Refused("The server is shutting down. Try again later.", 503, "shutting_down")


class Job:
    """One request on its way through the model.

    Args:
        request: The request.
        prompt: Its tokens.
        max_tokens: Most new tokens.
        pieces: Makes text of them.
        emit: Takes its events, from any thread.

    Attributes:
        cancelled: Set from outside when nobody waits for the answer any more; its row then ends with its next token.
        reason: Why it ended; `None` before.
    """

    def __init__(
        self,
        request: ChatRequest,
        prompt: list[int],
        max_tokens: int,
        pieces: TextPieces,
        emit: Callable[[Event], None],
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.pieces = pieces
        self.emit = emit
        self.cancelled = False
        self.reason: str | None = None
        self.reported = False
        self.num_tokens = 0

    def take(self, token: int, eos_tokens: set[int]) -> bool:
        """Take the next token; return whether the row ends with it."""
        if self.cancelled or self.reason is not None:
            return True
        self.num_tokens += 1
        if token in eos_tokens:
            self.reason = "stop"
        else:
            self._emit_text(self.pieces.add(token))
            if self.pieces.stopped:
                self.reason = "stop"
            elif self.num_tokens >= self.max_tokens:
                self.reason = "length"
        return self.reason is not None

    def report(self, work: dict[str, int]) -> None:
        """Send what is left, and that it is over."""
        self._emit_text(self.pieces.finish())
        reason = "stop" if self.reason == "stop" or self.pieces.stopped else "length"
        self.emit(Finished(reason, self.num_tokens, work))
        self.reported = True

    def fail(self) -> None:
        """Say that the model could not do it, unless it is over already."""
        self._end(Refused("The model failed while it answered. The server's log says why.", 500, "model_error"))

    def turn_away(self) -> None:
        """Say that the server stops, unless it is over already."""
        self._end(SHUTTING_DOWN)

    def _end(self, event: Refused) -> None:
        if not self.reported:
            self.emit(event)

    def _emit_text(self, text: str) -> None:
        if text:
            self.emit(Delta(text))
