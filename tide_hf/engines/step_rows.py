"""The sequences of a call in the rows of step buffers: their last tokens and positions, without reading the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from ..common.errors import UnsupportedOptionError
from ..speculation.drafts import Accepted
from .eager import last_tokens

T = TypeVar("T")


class StepRows:
    """Maps sequences to rows of buffers, which may have more rows than there are sequences.

    Shapes are fixed, so every row runs in every step. A row without an unfinished sequence gets the inputs of the
    first unfinished sequence, which are valid for the model, and the row's results are ignored.

    Args:
        num_rows: Rows of the buffers.
        positions: Each sequence's next position; several for mRoPE.
        max_new_tokens: How many tokens a sequence may add after those of prefill.
        num_positions: Size of the model's table of learned positions; `None` without one.
        checks_positions: Whether the model is given positions, which then have to be in that table.

    Attributes:
        own: The rows of the unfinished sequences, in ascending order.
        last_tokens: Each sequence's last token, the next pass's input.
        last_kept: Index in the last pass of the last token that each sequence accepted; `None` before the first.
    """

    def __init__(
        self,
        num_rows: int,
        positions: list[list[int]],
        max_new_tokens: int,
        num_positions: int | None,
        checks_positions: bool,
    ) -> None:
        self.num_rows, self.own = num_rows, list(range(len(positions)))
        self.last_tokens: list[int] = []
        self.last_kept: list[int] | None = None
        self._positions, self._added, self._most = positions, [0] * len(positions), max_new_tokens
        self._num_positions, self._checks_positions = num_positions, checks_positions
        self._highest = max(map(max, positions)) + max_new_tokens - 1  # that the answer reaches

    @property
    def sequences(self) -> list[int]:
        """For each row, the sequence whose inputs it gets."""
        numbers = {row: number for number, row in enumerate(self.own)}
        return [numbers.get(row, 0) for row in range(self.num_rows)]

    def to_rows(self, values: Sequence[T]) -> list[T]:
        """Map one value per sequence to one per row."""
        return [values[number] for number in self.sequences]

    def from_rows(self, found: Sequence[T]) -> list[T]:
        """Map one value per row to one per sequence."""
        return [found[row] for row in self.own]

    @property
    def index(self) -> slice | list[int]:
        """The rows of the sequences as an index, which the device gets as a list only if there are gaps."""
        return slice(len(self.own)) if self.own[-1] == len(self.own) - 1 else self.own

    def positions(self, back: int) -> list[list[int]]:
        """For each row, the position `back` tokens before its next one; several for mRoPE."""
        return self.to_rows([[position - back for position in kinds] for kinds in self._positions])

    @property
    def remaining(self) -> int:
        """How many tokens a sequence may still add."""
        return self._most - min(self._added)

    def may_add(self, count: int) -> bool:
        """Whether a sequence may still add so many tokens, and all have positions for them."""
        return self.remaining >= count and max(map(max, self._positions)) + count <= (self._num_positions or math.inf)

    def check_positions(self) -> int:
        """Raise if a row has reached a position that the model does not have; return the highest one of this round.

        Fixed shapes need a position for padding as well, so an index beyond the table raises no error by itself.
        """
        table = self._num_positions if self._checks_positions else None
        if table is None:
            return self._highest
        reached = min(max(map(max, self._positions)), self._highest)  # a stopped row may be one beyond
        if reached >= table:
            raise UnsupportedOptionError(
                "the answer is longer than the model has learned positions for",
                got=f"a token at position {reached}",
                expected=f"positions below {table}",
                do="Pass a smaller max_new_tokens, or a shorter prompt.",
            )
        return min(self._highest, table - 1)

    def commit(self, accepted: list[Accepted], *, is_prefill: bool) -> None:
        """Move each sequence on by its new tokens; those of prefill are the first that a pass reads."""
        self.last_tokens = last_tokens(self.last_tokens, accepted)
        if is_prefill:
            return
        self.last_kept = [one.kept[-1] if one.tokens else 0 for one in accepted]
        counts = [len(one.tokens) for one in accepted]
        moved = zip(self._positions, counts, strict=True)
        self._positions = [[position + count for position in kinds] for kinds, count in moved]
        self._added = [before + count for before, count in zip(self._added, counts, strict=True)]

    def select(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences, in their rows."""
        own, last, positions, added = (
            [values[number] for number in sequences]
            for values in (self.own, self.last_tokens, self._positions, self._added)
        )
        self.own, self.last_tokens, self._positions, self._added = own, last, positions, added  # type: ignore[assignment]
        self.last_kept = None if self.last_kept is None else [self.last_kept[number] for number in sequences]

    def move(self, num_rows: int) -> None:
        """Move the sequences to the first rows of other buffers."""
        self.num_rows, self.own = num_rows, list(range(len(self.own)))
