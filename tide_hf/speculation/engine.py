"""Protocols of the parts of the speculative loop: the engine that runs its passes, and the drafter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..common.token_sources import FULL_PASS
from .call import Call
from .policy import CostTable

UNREAD = -1  # placeholder for a draft token that the host has not read


@dataclass(frozen=True)
class Piece:
    """A part of a draft that one source wrote; `exit_layer` is 0 if no layer ran."""

    source: str
    length: int
    exit_layer: int = 0


@dataclass
class Draft:
    """Draft tokens of one row in one round, possibly none, and the sources that wrote them."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, tokens: list[int], source: str, exit_layer: int = 0) -> Draft:
        """Append what `source` drafted; return self."""
        if tokens:
            self.tokens = [*self.tokens, *tokens]
            self.pieces.append(Piece(source, len(tokens), exit_layer))
        return self

    def exit_layer_of(self, position: int) -> int:
        """The exit layer that drafted the token at `position`; 0 if no layer ran."""
        for piece in self.pieces:
            if position < piece.length:
                return piece.exit_layer
            position -= piece.length
        return 0

    def sources_of(self, new_tokens: list[int]) -> list[str]:
        """The source of each of a round's new tokens: that of an accepted draft token, else the full-depth pass."""
        written = (piece.source for piece in self.pieces for _ in range(piece.length))
        drafted = [
            source if token == new else FULL_PASS
            for source, token, new in zip(written, self.tokens, new_tokens, strict=False)
        ]
        return drafted + [FULL_PASS] * (len(new_tokens) - len(drafted))


class Drafter(Protocol):
    """Drafts the tokens of one call."""

    @property
    def rests(self) -> bool:
        """Whether the next round is sure to have no drafts, whatever the tokens of this one."""

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft at most `limits[i]` tokens for row `rows[i]`, for each row that is still in the batch."""

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Learn how many tokens of a row's draft were accepted; `new_tokens` were added to the row."""


class DraftEngine(Protocol):
    """The part of an engine that a drafter uses: drafting with a head, one token per row at a time."""

    temperature: float  # of the call's sampling; 0 for greedy decoding
    reads_drafts: bool  # whether the host reads each draft token; if not, `draft_unread` replaces `draft`

    @property
    def head_layer(self) -> int | None:
        """The draft head's exit layer, 0; `None` if it does not draft.

        It cannot continue another source's draft.
        """

    def draft(self, exit_layer: int, drafted: list[list[int]]) -> tuple[list[int], list[float]]:
        """Draft one token for each row with the head at an exit layer; return the tokens and their exit scores.

        `drafted` are the tokens that each row has drafted in this round, the same number for all rows.
        """

    def draft_logits(self, drafted: list[list[int]]) -> Tensor:
        """Run the draft head for one more token of each row, after those in `drafted`, as `draft` does.

        Returns its logits, (rows, vocabulary) in float32, -inf at tokens that it cannot draft.
        """

    def draft_unread(self, exit_layer: int, num_tokens: int) -> None:
        """Draft `num_tokens` tokens for each row; the host does not read them before they are verified."""

    def rollback(self) -> None:
        """Forget the draft steps since the last rollback, and their K/V."""

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of this engine's passes over `num_rows` rows."""


class Engine(DraftEngine, Protocol):
    """Runs the passes of one call of `generate`, and stores their K/V.

    A call runs `prefill`, `begin`, rounds (any number of `draft` steps, then `verify` and `commit`), and `finish`. The
    rows of the batch keep their order; `select` drops rows.
    """

    name: str  # by which users choose the engine

    @property
    def layers_executed(self) -> int:
        """Decoder layers that ran to their end, each counted once per row and pass."""

    @property
    def free_slots(self) -> int | None:
        """How many draft tokens the cache or learned position embeddings still allow; `None` without a limit."""

    def running(self) -> AbstractContextManager[None]:
        """The context for all other methods; after an error in it, the caller can still use the cache."""

    def decoding(self) -> AbstractContextManager[None]:
        """The context in which rounds run."""

    def prefill(self) -> Tensor:
        """Run prefill; return the logits of the last prompt tokens, (rows, 1, vocabulary)."""

    def begin(self, tokens: list[int]) -> None:
        """Set each row's first generated token."""

    def decoder(self, room: int) -> Engine:
        """The engine (this or another) that runs the rounds, in which a row may add at most `room` tokens."""

    def verify(self, drafted: list[list[int]]) -> None:
        """Run one full-depth pass over each row's last token and draft."""

    def drafted(self) -> list[list[int]] | None:
        """The draft tokens of the last pass; `None` if the drafter has read them already."""

    def logits(self) -> Tensor:
        """(rows, width, vocabulary) logits of the last pass; those after a row's last draft token are arbitrary."""

    def depths(self) -> list[int] | None:
        """For each row, after how many layers its token of the last pass was chosen; `None`: after all layers."""

    def inputs(self) -> Tensor:
        """(rows, at least width) tokens that the last pass read: each row's last token, its draft, and padding."""

    def top_tokens(self, chosen: Tensor | None = None, *, runs_ahead: bool = False) -> list[list[int]]:
        """The top-1 token at each position of the last pass, or those `chosen` on the device, (rows, width).

        With `runs_ahead`, which says that the next pass will have no drafts, the engine may start it before it waits.
        """

    def commit(self, new_tokens: list[list[int]]) -> None:
        """Retain the K/V of the accepted tokens of the last pass, and roll back the rest.

        `new_tokens` are each row's accepted draft tokens and one more token, whose K/V the next pass stores.
        """

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""

    def finish(self, settle: bool) -> Any:
        """Return the cache; if the call returns it, it is as after plain decoding. `settle` removes rejected tokens."""


class EngineKind(Protocol):
    """An engine that users choose by name, with its state between calls."""

    @property
    def warm_up_seconds(self) -> float:
        """Seconds that its warm-up has taken so far."""

    def showing_warm_up(self) -> AbstractContextManager[None]:
        """The context that shows the progress of a warm-up on a terminal."""

    def engine(self, model: Any, attachment: Any, call: Call) -> Engine:
        """The engine of one call on an attached model."""

    def exit_engine(self, model: Any, attachment: Any, call: Call, options: Any) -> Engine | str:
        """The engine of one `early_exit` call with exit layers; or the reason why it runs layer by layer."""

    def log_eager(self, reason: str) -> None:
        """Log that a call for this engine runs eagerly; the first time for each reason, as a warning."""

    def release(self) -> None:
        """Free the memory that is retained between calls."""
