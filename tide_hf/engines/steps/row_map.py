"""The mapping between the rows of the buffers and the sequences of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class RowMap:
    """Maps sequences to rows of buffers, which may have more rows than there are sequences.

    Shapes are fixed, so every row runs in every step. A row without a sequence, or whose sequence has finished, gets
    the inputs of the first sequence, which are valid for the model; its results are ignored.

    Args:
        num_sequences: Number of sequences, which take the first rows.
        num_rows: Number of rows of the buffers.

    Attributes:
        own: The row of each unfinished sequence, ascending.
    """

    def __init__(self, num_sequences: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self.own = list(range(num_sequences))

    @property
    def shown(self) -> list[int]:
        """For each row, the index of the sequence whose inputs it gets."""
        numbers = {row: number for number, row in enumerate(self.own)}
        return [numbers.get(row, 0) for row in range(self.num_rows)]

    def spread(self, values: Sequence[T]) -> list[T]:
        """Map one value per sequence to one per row."""
        return [values[number] for number in self.shown]

    def gather(self, found: Sequence[T]) -> list[T]:
        """Map one value per row to one per sequence."""
        return [found[row] for row in self.own]

    def keep(self, going: Sequence[int]) -> None:
        """Keep these sequences alone."""
        self.own = [self.own[number] for number in going]
