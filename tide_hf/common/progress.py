"""Progress bars on a terminal or in a notebook, and log lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 60  # in a log


@contextmanager
def waiting(console: Console, description: str) -> Iterator[None]:
    """Say what the body does while it runs: with a spinner and the time on a terminal, by a line elsewhere."""
    if not console.is_terminal:
        console.print(f"{description} ...", markup=False, highlight=False, soft_wrap=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(description, total=None)
        yield


class Steps:
    """One progress bar per step, if `enabled`; log lines if there is neither a terminal nor a notebook."""

    def __init__(self, enabled: bool) -> None:
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._console = console = Console(stderr=True)
        has_bars = console.is_terminal or console.is_jupyter
        self._progress = Progress(*columns, *times, console=console, disable=not (enabled and has_bars))
        self._is_log = enabled and not has_bars
        self._is_shown = enabled

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, description: str, total: int) -> Callable[[int], None]:
        """Start a step of `total` units; return a function to call with the number of units newly done."""
        if self._is_log:
            return self._log_lines(description, total)
        task = self._progress.add_task(description, total=total)
        return lambda count: self._progress.update(task, advance=count)

    def say(self, text: str) -> None:
        """Print a line above the bars, or among the log lines."""
        if self._is_shown:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def track(self, description: str, items: Iterable[Item], total: int) -> Iterator[Item]:
        """Yield `items`, and advance the bar after each item."""
        advance = self.begin(description, total)
        for item in items:
            yield item
            advance(1)

    def _log_lines(self, description: str, total: int) -> Callable[[int], None]:
        """Log the start of a step, and its progress at most once a minute."""
        num_done, logged_at = 0, float("-inf")

        def advance(count: int) -> None:
            nonlocal num_done, logged_at
            num_done += count
            now = perf_counter()
            if now - logged_at >= SECONDS_BETWEEN_LINES:
                logged_at = now
                self._console.print(f"{description}: {num_done} of {total}", highlight=False)

        advance(0)
        return advance
