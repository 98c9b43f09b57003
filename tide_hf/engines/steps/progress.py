"""Count what warm-up takes, and show it in a progress line on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging


class WarmUp:
    """Counts steps or kernels that are prepared once and kept between calls.

    The progress line obeys `transformers.utils.logging.disable_progress_bar`, and is only drawn on a terminal.

    Args:
        description: Label of the line.
        unit: Name of what is counted, in the plural.

    Attributes:
        num_made: Number prepared so far.
        seconds: Time that they took.
        bytes: Device memory that they took.
    """

    def __init__(self, description: str, unit: str) -> None:
        self.description, self.unit = description, unit
        self.num_made, self.seconds, self.bytes = 0, 0.0, 0
        self._line: Any = None
        self._shown = 0

    def __reduce__(self) -> tuple:
        """Leave counts out of copies and pickles."""
        return WarmUp, (self.description, self.unit)

    @contextmanager
    def shown(self, *, is_due: bool = False) -> Iterator[None]:
        """Show the line while steps are prepared within; nested uses share one line.

        Args:
            is_due: Whether to draw the line at once.
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
        """Add what was prepared."""
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
