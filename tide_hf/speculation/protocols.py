"""Protocols of the parts of the speculative loop: engine, drafter and acceptance rule, and of what they hand on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from .call import Call
from .drafts import Accepted, Draft
from .policy import CostTable
from .ranks import Ranks
from .rows import Row


class Pass(Protocol):
    """A full-depth pass over each row's last token and draft, of which no token has been accepted yet."""

    @property
    def drafts(self) -> list[Draft]:
        """What each row's pass has verified. On an engine that does not read drafts, `tokens` or this waits for it."""

    @property
    def has_trees(self) -> bool:
        """Whether a row's draft has siblings; does not wait."""

    @property
    def logits(self) -> Tensor:
        """(rows, width, vocabulary): after the last token, and after each draft token; beyond a row's draft, anything.

        On the device of the model's head.
        """

    @property
    def inputs(self) -> Tensor:
        """(rows, width) tokens that the pass has read: each row's last token, its draft, and padding."""

    @property
    def depths(self) -> list[int]:
        """For each row, after how many layers its last token's logits were computed."""

    def tokens(self, chosen: Tensor | None = None) -> list[list[int]]:
        """Read the top-1 token at each position, or those `chosen` on the device, (rows, width)."""


class Drafter(Protocol):
    """Drafts the tokens of one call."""

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft for each row that is still in the batch; `rows[i]` is its index in the call.

        No path of its draft may have more than `limits[i]` tokens.
        """

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        """Learn what a round has added to a row, and the draft that was verified.

        The first token of the answer comes with an empty draft.
        """


class AcceptanceRule(Protocol):
    """Chooses the tokens of one call from full-depth passes, and ends its rows."""

    rows: list[Row]  # all of the call
    is_exact: bool  # whether its tokens are those of plain decoding

    @property
    def keeps_ended_rows(self) -> bool:
        """Whether rows that have ended stay in the batch until all have."""

    @property
    def lockstep(self) -> bool:
        """Whether all rows of a batch accept the same number of tokens in each round."""

    def limit(self, row: Row) -> int:
        """How many tokens a row may still add."""

    def accept(self, batch: list[Row], verified: Pass) -> list[Accepted]:
        """Add tokens to each row of `batch`, position by position, as far as its draft has been right."""


class DraftEngine(Protocol):
    """The part of an engine that a drafter uses: drafting with a head, one token per row at a time."""

    @property
    def reads_drafts(self) -> bool:
        """Whether the host reads the tokens and scores of each draft step. If not, one call drafts a whole chain."""

    takes_trees: bool  # whether passes verify trees; if not, they verify the `chain` of each

    @property
    def head_layer(self) -> int | None:
        """The draft head's exit layer, 0, for `draft`; `None` if there is none, or it cannot draft in this call.

        A draft head cannot continue another source's draft.
        """

    def draft(
        self, exit_layer: int, drafted: list[list[int]], num_tokens: int = 1
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draft for each row with the head at an exit layer.

        `drafted` are the tokens that each row has drafted in this round, the same number for all rows.

        Returns:
            Each row's likeliest next tokens, best first, and the probability of each that the base model agrees. Where
            the host does not read drafts, `num_tokens` tokens after one another, which stand for those that the next
            pass will have verified, and no probabilities.
        """

    def likeliest(self) -> list[tuple[list[int], list[list[int]]]]:
        """For each row, the tokens that the last pass read, and after each of them the likeliest ones, best first.

        Empty after prefill, and where they cannot be read without waiting for a device.
        """

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of this engine's passes over `num_rows` rows."""


class Engine(DraftEngine, Protocol):
    """Runs the passes of one call of `generate` after its prefill, and stores their K/V.

    Within `running`, the tokens that prefill gave are committed; then come rounds of any number of draft steps,
    `verify` and `commit`; and `finish`. The rows of the batch keep their order; `select` drops rows.
    """

    name: str  # by which users choose the engine

    @property
    def layers_executed(self) -> int:
        """Decoder layers that ran to their end, each counted once per row and pass."""

    @property
    def max_draft_tokens(self) -> int | None:
        """How many tokens a row may draft: what passes, cache and learned positions allow; `None` without a limit."""

    def running(self) -> AbstractContextManager[None]:
        """The context for all other methods; after an error in it, the caller can still use the cache."""

    def verify(self, drafts: list[Draft]) -> Pass:
        """Forget the K/V of draft steps, and run one full-depth pass over each row's last token and draft.

        An engine may start the next round before this one's tokens are accepted, where it is expected to be alike and
        tokens are read as the top-1 ones.
        """

    def commit(self, accepted: list[Accepted]) -> None:
        """Retain the K/V of the accepted tokens of the last pass, or of prefill, and roll back the rest.

        The last of a row's new tokens is the first that its next pass reads.
        """

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""

    def finish(self, compact: bool) -> Any:
        """Return the cache, as after plain decoding if the call returns it; `compact` removes rejected tokens."""


class EngineKind(Protocol):
    """An engine that users choose by name, with its state between calls."""

    @property
    def warm_up_seconds(self) -> float:
        """Seconds that its warm-up has taken so far."""

    def showing_warm_up(self) -> AbstractContextManager[None]:
        """The context that shows the progress of a warm-up on a terminal."""

    def prefill(self, model: Any, attachment: Any, call: Call) -> tuple[Pass, Engine]:
        """Run the prompts of a call; return this pass, of width 1, and the engine that decodes."""

    def prefill_exits(self, model: Any, attachment: Any, call: Call, options: Any) -> tuple[Pass, Engine] | str:
        """As `prefill`, for an `early_exit` call whose tokens exit at exit layers as `options` say.

        Returns the reason instead if the call has to run layer by layer, without this engine.
        """

    def log_eager(self, reason: str) -> None:
        """Log that a call for this engine runs eagerly; the first time for each reason, as a warning."""

    def release(self) -> None:
        """Free the memory that is retained between calls."""


# Makes the drafter of a call, given the attachment, the call and the engine that decodes.
DrafterFactory = Callable[[Any, Call, DraftEngine], Drafter]
# Makes the acceptance rule of a call, given the call, the processes that have to choose the same tokens, and whether
# all rows must have the same length, since the model's attention counts cache slots.
RuleFactory = Callable[[Call, Ranks, bool], AcceptanceRule]
