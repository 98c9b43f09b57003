"""What making an engine ready takes, and a line on the terminal that shows it while somebody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging


class WarmUp:
    """Counts what is made ready once and kept from call to call.

    The line obeys `transformers.utils.logging.disable_progress_bar`, and is only drawn on a terminal.

    Args:
        description: What is being done, for the line.
        unit: What is counted, in the plural.

    Attributes:
        num_made: Things made ready so far.
        seconds: What that took.
        bytes: Device memory that it took.
    """

    def __init__(self, description: str, unit: str) -> None:
        self.description, self.unit = description, unit
        self.num_made, self.seconds, self.bytes = 0, 0.0, 0
        self._line: Any = None
        self._shown = 0

    def __reduce__(self) -> tuple:
        """Copies and pickles count for themselves."""
        return WarmUp, (self.description, self.unit)

    @contextmanager
    def shown(self, *, is_due: bool = False) -> Iterator[None]:
        """A call, or several in turn, in which things may have to be made ready: the line ends with the outermost.

        Args:
            is_due: Draw the line at once, since something will be.
        """
        if is_due:
            self._draw()
        self._shown += 1
        try:
            yield
        finally:
            self._shown -= 1
            if self._line is not None and not self._shown:
                self._line.close()
                self._line = None

    def add(self, number: int, seconds: float, num_bytes: int = 0) -> None:
        """Count what was made ready."""
        self.num_made, self.seconds, self.bytes = self.num_made + number, self.seconds + seconds, self.bytes + num_bytes
        if number:
            self._draw()

    def _draw(self) -> None:
        if self._line is None:
            layout = "{desc}: {n_fmt} {unit}{postfix}"
            self._line = logging.tqdm(desc=self.description, unit=self.unit, bar_format=layout, disable=None)
        self._line.n = self.num_made
        memory = f", {self.bytes / 1e6:.0f} MB" if self.bytes else ""
        self._line.set_postfix_str(f"{self.seconds:.1f} s{memory}")
