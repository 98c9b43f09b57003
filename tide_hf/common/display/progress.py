"""Progress bars on a terminal or in a notebook, lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 60  # in a log


class Steps:
    """One progress bar per step; log lines if there is neither a terminal nor a notebook.

    Args:
        enabled: Whether to show anything.
    """

    def __init__(self, enabled: bool) -> None:
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._console = console = Console(stderr=True)
        seen = console.is_terminal or console.is_jupyter
        self._progress = Progress(*columns, *times, console=console, disable=not (enabled and seen))
        self._is_log = enabled and not seen

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, description: str, total: int) -> Callable[[int], None]:
        """Start a step of `total` units; call the result with the number of units done since."""
        if self._is_log:
            return _LogLines(self._console, description, total)
        task = self._progress.add_task(description, total=total)
        return lambda count: self._progress.update(task, advance=count)

    def track(self, description: str, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Yield `items`, and advance the bar after each."""
        advance = self.begin(description, total)
        for item in items:
            yield item
            advance(1)


class _LogLines:
    """Logs the start of a step, and once a minute its progress."""

    def __init__(self, console: Console, description: str, total: int) -> None:
        self._console, self._description, self._total = console, description, total
        self._num_done, self._told = 0, perf_counter()
        self._tell()

    def __call__(self, count: int) -> None:
        """Advance by `count` units."""
        self._num_done += count
        now = perf_counter()
        if now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            self._tell()

    def _tell(self) -> None:
        self._console.print(f"{self._description}: {self._num_done} of {self._total}", highlight=False)
