"""`early_exit` with a draft head: the self-speculative loop, in which drafted tokens are not verified.

After a full-depth pass the head drafts. Each token whose score reaches the threshold exits: it becomes part of the
answer at once, and no layer of the base model runs before the next token. The first token whose score falls short ends
the run of exits. The next full-depth pass takes the tokens of the run along, as a verify pass would, so their K/V are
exact; but its logits are read only after the last of them, and no exit is taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..common.errors import UnsupportedOptionError
from ..common.token_sources import DRAFT_HEAD
from .acceptance import AcceptanceRule
from .engine import Draft, DraftEngine, Engine
from .rows import Row

MAX_EXITS = 8  # in a row


class ExitRule(AcceptanceRule):
    """Adds the tokens that exit, and after a full-depth pass each row's next token.

    The processors run on the head's logits as they would on the base model's. The score is that of the token which is
    most likely after them. Where it reaches the threshold, that token exits; in sampling one that is drawn from the
    head's distribution does. So the decision to exit does not depend on what is drawn. A processor is called twice
    for a position at which no token exits, and up to three times for one at which a token does.

    Args, besides those of `AcceptanceRule`:
        score: Maps log-probabilities of the head's tokens to exit scores; see `DraftHead.score`.
        exit_threshold: A token exits if `score >= exit_threshold`.
    """

    def __init__(self, *args: Any, score: Callable[[Tensor], Tensor], exit_threshold: float) -> None:
        super().__init__(*args)
        self.on_device = None  # whether a token exits decides what is chosen next
        self.score, self.exit_threshold = score, exit_threshold

    def exit(self, batch: list[Row], logits: Tensor, may_exit: list[bool]) -> list[bool]:
        """Add a token to each row that exits, of those that may.

        Args:
            batch: The rows in the batch.
            logits: (rows, vocabulary) of the head, for the next token of each row.
            may_exit: For each row, whether it may exit.

        Returns:
            For each row, whether it has exited.
        """
        if self.together:  # all rows that have not stopped exit, or none
            going = [row.stopped_at is None for row in batch]
            exits = all(may for may, goes in zip(may_exit, going, strict=True) if goes)
            if exits:
                passed = self._passes(batch, logits)
                exits = all(one for one, goes in zip(passed, going, strict=True) if goes)
            if exits:
                super().accept(batch, logits[:, None], [Draft() for _ in batch], None, [0] * len(batch))
            return [exits] * len(batch)
        exits_of = []
        for index, (row, may) in enumerate(zip(batch, may_exit, strict=True)):
            own = logits[index : index + 1]
            exits_of.append(may and self._passes([row], own)[0])
            if exits_of[-1]:
                super().accept([row], own[:, None], [Draft()], None, [0])
        return exits_of

    def accept(
        self,
        batch: list[Row],
        logits: Tensor | None,
        drafts: list[Draft],
        top_tokens: list[list[int]] | None,
        depths: list[int],
    ) -> list[list[int]]:
        """Choose each row's token after its exits, which `exit` has added; return the exits and this token."""
        if self.together and all(row.stopped_at is not None for row in self.rows):
            return [draft.tokens for draft in drafts]
        after = [len(draft.tokens) for draft in drafts]
        if logits is not None:
            logits = torch.stack([row[position : position + 1] for row, position in zip(logits, after, strict=True)])
        if top_tokens is not None:
            top_tokens = [[row[position]] for row, position in zip(top_tokens, after, strict=True)]
        new_tokens = super().accept(batch, logits, [Draft() for _ in batch], top_tokens, depths)
        return [[*draft.tokens, *tokens] for draft, tokens in zip(drafts, new_tokens, strict=True)]

    def _passes(self, rows: list[Row], logits: Tensor) -> list[bool]:
        """Whether the score of each row's most likely token, after the processors, reaches the threshold."""
        ids = torch.cat([row.ids for row in rows])
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        log_probabilities = logits.log_softmax(dim=-1)
        best, top = self.processors_of[rows[0].index](ids, logits).max(dim=-1, keepdim=True)
        scores = self.score(log_probabilities.gather(1, top)).to(best.device)
        passed = (scores >= self.exit_threshold) & (best > -torch.inf)  # processors may forbid all the head can draft
        return [bool(self.ranks.agree(one)) for one in passed[:, 0].tolist()]


class ExitDrafter:
    """Has the head draft while tokens exit, at most `MAX_EXITS` in a row; the drafts are the tokens that have exited.

    Raises [`UnsupportedOptionError`] if the head cannot draft in this call.
    """

    def __init__(self, engine: Engine, rule: ExitRule) -> None:
        if engine.head_layer != 0:
            raise UnsupportedOptionError(
                "the draft head cannot run in this tide_mode='early_exit' call",
                got="a cache that holds tokens without the head's state for them, or of a kind that the model replaces",
                expected="an empty cache, or one that a call with this head returned",
                do="Leave the cache out, or choose tide_mode='self_speculative'.",
            )
        self.engine: DraftEngine = engine
        self.rule = rule

    @property
    def rests(self) -> bool:
        """Whether no score reaches the threshold."""
        return self.rule.exit_threshold > 1

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Let tokens exit, at most `limits[i]` for row `rows[i]`."""
        batch = [self.rule.rows[row] for row in rows]
        starts = [len(row.tokens) for row in batch]
        if not self.rests:
            self._exit(batch, limits)
        return [Draft().add(row.tokens[start:], DRAFT_HEAD) for row, start in zip(batch, starts, strict=True)]

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Learn nothing, since no token is judged."""

    def _exit(self, batch: list[Row], limits: list[int]) -> None:
        drafted: list[list[int]] = [[] for _ in batch]
        may_exit = [row.stopped_at is None for row in batch]
        for step in range(MAX_EXITS):
            may_exit = [may and step < limit for may, limit in zip(may_exit, limits, strict=True)]
            if not any(may_exit):
                break
            exited = self.rule.exit(batch, self.engine.draft_logits(drafted), may_exit)
            may_exit = [has and row.stopped_at is None for row, has in zip(batch, exited, strict=True)]
            # The head runs on all rows; what it reads in those that have ended their exits is rolled back unread.
            drafted = [[*before, row.last] for before, row in zip(drafted, batch, strict=True)]
        self.engine.rollback()


class NoDrafter:
    """Drafts nothing: for passes of which each gives one token."""

    rests = True

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft nothing."""
        return [Draft() for _ in rows]

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Learn nothing."""
