"""What the speculative loop is composed of, as protocols: the engine that runs its passes, and the drafter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .call import Call
from .policy import CostTable

UNREAD = -1  # stands for a draft token that is still on the device


@dataclass(frozen=True)
class Piece:
    """A part of a draft that one source wrote; `exit_layer` is 0 where no layer ran."""

    source: str
    length: int
    exit_layer: int = 0


@dataclass
class Draft:
    """Draft tokens of one row in one round, possibly none, and the sources that took turns to write them."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, tokens: list[int], source: str, exit_layer: int = 0) -> Draft:
        """Append what `source` drafted; return self."""
        if tokens:
            self.tokens = [*self.tokens, *tokens]
            self.pieces.append(Piece(source, len(tokens), exit_layer))
        return self

    def exit_layer_of(self, position: int) -> int:
        """The layer that drafted the token at `position`, 0 where no layer ran."""
        for piece in self.pieces:
            if position < piece.length:
                return piece.exit_layer
            position -= piece.length
        return 0


class Drafter(Protocol):
    """Where the drafts of one call come from."""

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft at most `limits[i]` tokens for each row `rows[i]` that still decodes."""

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Learn how many tokens of a row's draft were accepted; `new_tokens` were added to its sequence."""


class DraftEngine(Protocol):
    """The part of an engine that a drafter uses: decoding by a draft head, one token a row at a time."""

    temperature: float  # of the call's sampling; 0 for greedy decoding
    reads_drafts: bool  # whether the host reads each draft token; if not, `draft_unread` replaces `draft`

    @property
    def block_layer(self) -> int | None:
        """The exit layer of the block head, which drafts after no other source; `None` where it does not draft."""

    def draft(self, exit_layer: int, drafted: list[list[int]]) -> tuple[list[int], list[float]]:
        """Decode one token for each row by the head at an exit layer; return the tokens and their exit scores.

        `drafted` are the tokens that each row has drafted in this round, as many for all rows.
        """

    def draft_unread(self, exit_layer: int, num_tokens: int) -> None:
        """Decode so many tokens for each row, which the host does not read before they are verified."""

    def rollback(self) -> None:
        """Forget the draft steps since the last rollback, and their K/V."""

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of this engine's passes over so many rows."""


class Engine(DraftEngine, Protocol):
    """Runs the passes of one call of `generate`, and stores their K/V.

    A call is `prefill`, `begin`, and rounds of any number of `draft` steps, `verify` and `commit`; then `finish`. The
    rows of the batch stay in order; `select` drops some of them.
    """

    name: str  # as users name it

    @property
    def layers_executed(self) -> int:
        """Decoder layers that ran to their end, each counted once per row and pass."""

    @property
    def free_slots(self) -> int | None:
        """Tokens that the cache has room for after the last ones; `None` for a cache that grows."""

    def running(self) -> AbstractContextManager[None]:
        """What all other methods are called inside of; after an error the caller's cache can still be used."""

    def decoding(self) -> AbstractContextManager[None]:
        """What rounds are run inside of."""

    def prefill(self) -> Tensor:
        """Run prefill; return the logits of the last prompt tokens, (rows, 1, vocabulary)."""

    def begin(self, tokens: list[int]) -> None:
        """Set each row's first generated token."""

    def decoder(self, room: int) -> Engine:
        """The engine that runs the rounds, in which a row may generate `room` tokens: this one, or another."""

    def verify(self, drafted: list[list[int]]) -> None:
        """Run one full-depth pass over each row's last token and what it has drafted."""

    def drafted(self) -> list[list[int]] | None:
        """The draft tokens of the last pass, where they were not read before; else `None`."""

    def logits(self) -> Tensor:
        """(rows, width, vocabulary) of the last pass; those after a row's last draft token are arbitrary."""

    def top_tokens(self) -> list[list[int]]:
        """The top-1 token at each position of the last pass."""

    def commit(self, new_tokens: list[list[int]]) -> None:
        """Retain the K/V of the accepted tokens of the last pass, and roll back the rest.

        `new_tokens` are each row's accepted draft tokens and one more, whose K/V the next pass stores.
        """

    def select(self, rows: list[int]) -> None:
        """Drop all other rows of the batch."""

    def finish(self, settle: bool) -> Any:
        """Return the cache as plain decoding would leave it, if the caller receives it; `settle` aligns its rows."""


class EngineKind(Protocol):
    """An engine as users name it, with what it retains from call to call."""

    @property
    def warm_up_seconds(self) -> float:
        """Seconds that its warm-up has taken so far."""

    def showing_warm_up(self) -> AbstractContextManager[None]:
        """Show on a terminal that it warms up, while it does."""

    def engine(self, model: Any, attachment: Any, call: Call) -> Engine:
        """The engine of one call on an attached model."""

    def log_eager(self, reason: str) -> None:
        """Log that a call which asked for this engine runs eagerly, as a warning at the first of each reason."""

    def release(self) -> None:
        """Free the memory that is retained between calls."""
