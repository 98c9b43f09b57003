"""The seam between the speculative loop and whatever runs its passes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from .costs import CostTable


class EngineKind(Protocol):
    """An engine as users name it, with what it keeps from call to call.

    Attributes:
        warm_up_seconds: What making it ready has taken so far.
    """

    @property
    def warm_up_seconds(self) -> float:
        """See above."""

    def showing_warm_up(self) -> AbstractContextManager[None]:
        """Show on a terminal that it is made ready, while it is."""

    def engine(
        self, model: Any, attachment: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Engine:
        """The engine of one call.

        Args:
            model: The attached model.
            attachment: What TIDE added to it.
            input_ids: (rows, prompt length).
            generation_config: Of this call.
            model_kwargs: What `generate` prepared.
        """

    def log_eager(self, reason: str) -> None:
        """Log that a call which asked for this engine runs eagerly, as a warning at the first of each reason."""

    def release(self) -> None:
        """Give back the memory that is kept between calls."""


class DraftEngine(Protocol):
    """The part of an engine that a drafter uses: decoding by a draft head, one token a row at a time.

    Attributes:
        temperature: Of the call's sampling; 0 for greedy decoding.
        block_layer: The exit layer at which the block head drafts; `None` where it does not. It cannot go on behind the
            tokens of another source.
        reads_drafts: Whether each draft token is read by the host. Where it is not, `draft_unread` takes the place of
            `draft`.
    """

    temperature: float
    reads_drafts: bool

    @property
    def block_layer(self) -> int | None:
        """See above."""

    def draft(self, exit_layer: int, drafted: list[list[int]]) -> tuple[list[int], list[float]]:
        """Decode one token for each row by the head at an exit layer.

        Args:
            exit_layer: The exit layer.
            drafted: The tokens that each row has drafted in this round, as many for all rows.

        Returns:
            Each row's token, and its exit score.
        """

    def draft_unread(self, exit_layer: int, num_tokens: int) -> None:
        """Decode so many tokens for each row, which nobody reads before they are verified."""

    def rollback(self) -> None:
        """Forget the draft steps since the last rollback, and their K/V."""

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of this engine's passes over so many rows."""


class Engine(DraftEngine, Protocol):
    """Runs the passes of one call of `generate`, and keeps their K/V.

    A call is `prefill`, `begin`, and rounds of any number of `draft` steps, `verify` and `commit`; then `finish`. The
    rows of the batch keep their order; `select` drops some of them.

    Attributes:
        name: As users name it.
        layers_executed: Decoder layers that ran to their end, each counted once per row and pass.
    """

    name: str

    @property
    def layers_executed(self) -> int:
        """See above."""

    def running(self) -> AbstractContextManager[None]:
        """What all other methods are called inside of; an error leaves a cache that the caller can go on with."""

    def decoding(self) -> AbstractContextManager[None]:
        """What rounds are run inside of."""

    def prefill(self) -> Tensor:
        """Read the prompts; return the logits behind them, (rows, 1, vocabulary)."""

    def begin(self, tokens: list[int]) -> None:
        """Take each row's first token."""

    def decoder(self, room: int) -> Engine:
        """The engine that runs the rounds: this one, or the one that takes over behind the prompt.

        Args:
            room: Most tokens that a row may still add.
        """

    @property
    def free_slots(self) -> int | None:
        """Tokens that the cache has room for behind the newest ones; `None` for a cache that grows."""

    def verify(self, drafted: list[list[int]]) -> None:
        """Run one full-depth pass over each row's newest token and what it has drafted."""

    def drafted(self) -> list[list[int]] | None:
        """What the last pass verified, where that was not read before; else `None`."""

    def logits(self) -> Tensor:
        """(rows, width, vocabulary) of the last pass; what stands behind a row's last draft token is of no account."""

    def top_tokens(self) -> list[list[int]]:
        """The most likely token at each position of the last pass."""

    def commit(self, new_tokens: list[list[int]]) -> None:
        """Keep the K/V of the tokens that the last pass has verified.

        Args:
            new_tokens: Of each row, the accepted draft tokens and one more, whose K/V the next pass stores.
        """

    def select(self, kept: list[int]) -> None:
        """Go on with these rows of the batch alone."""

    def finish(self, settle: bool) -> Any:
        """Return the cache as plain decoding would leave it, if the caller gets to see it.

        Args:
            settle: Whether the rows are to end at the same slot.
        """
