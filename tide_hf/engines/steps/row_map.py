"""Which row of the buffers belongs to which sequence of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class RowMap:
    """The rows of buffers that may have more of them than there are sequences.

    Shapes are fixed, so every row takes part in every step. One that belongs to no sequence, or to one that is over, is
    told what the first sequence is told: so it stays within what the model allows, and nobody looks at it.

    Args:
        num_sequences: Sequences, in the first rows.
        num_rows: Rows of the buffers.

    Attributes:
        own: The row of each sequence that goes on, ascending.
    """

    def __init__(self, num_sequences: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self.own = list(range(num_sequences))

    @property
    def shown(self) -> list[int]:
        """For each row the number of the sequence that it is told of."""
        numbers = {row: number for number, row in enumerate(self.own)}
        return [numbers.get(row, 0) for row in range(self.num_rows)]

    def spread(self, values: Sequence[T]) -> list[T]:
        """From one value for each sequence to one for each row."""
        return [values[number] for number in self.shown]

    def gather(self, found: Sequence[T]) -> list[T]:
        """From one value for each row to one for each sequence."""
        return [found[row] for row in self.own]

    def keep(self, going: Sequence[int]) -> None:
        """Go on with these sequences alone."""
        self.own = [self.own[number] for number in going]
