"""What the passes of a call cost, as the drafting policy learns it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from ..speculation.policy import CostTable


class RoundClock:
    """Times draft steps, verify passes and what is done between them, and records them in the cost table of the batch.

    Args:
        costs_of: The cost table for a number of rows.
        agree: Gives the first process's time to all that share a model.
        num_prepared: How many steps have been prepared. Times of a round that prepared one are not recorded.
    """

    def __init__(
        self,
        costs_of: Callable[[int], CostTable],
        agree: Callable[[float], float] = float,
        num_prepared: Callable[[], int] = int,
    ) -> None:
        self._costs_of, self._agree, self._num_prepared = costs_of, agree, num_prepared
        self._prepared, self._begin = num_prepared(), 0.0
        self._last: float | None = None  # when the last round ended
        self._in_drafts = 0.0  # milliseconds of this round's draft steps
        # Of draft steps that the host does not wait for: exit layer, number, timestamps before and after them.
        self._unread: tuple[int, int, Any, Any] | None = None

    def begin(self, at: float | None = None) -> None:
        """Begin a pass, now or `at` a time of `perf_counter`."""
        self._begin = perf_counter() if at is None else at

    def end_draft(self, exit_layer: int, rows: int, num_steps: int = 1, *, is_usual: bool = True) -> None:
        """End draft steps that `begin` began and the host has read."""
        milliseconds = self._agree((perf_counter() - self._begin) * 1000) / num_steps
        self._in_drafts += milliseconds * num_steps
        if self._is_warm:
            self._costs_of(rows).record(("draft", exit_layer), milliseconds, num_steps, is_usual=is_usual)

    def note_unread(self, exit_layer: int, num_steps: int, before: Any, after: Any) -> None:
        """Note draft steps since `begin`, between two timestamps, that the host has not waited for."""
        self._unread = exit_layer, num_steps, before, after

    def end_round(self, width: int, rows: int, *, is_full: bool = True) -> None:
        """End a verify pass over `width` tokens of each row; one that may end early says nothing of full ones."""
        now = perf_counter()
        milliseconds = in_pass = self._agree((now - self._begin) * 1000)
        has_drafts = width > 1 or self._in_drafts > 0.0
        if self._unread is not None:
            exit_layer, num_steps, before, after = self._unread
            drafts = before.elapsed_time(after) if isinstance(before, torch.cuda.Event) else (after - before) * 1000
            milliseconds, self._unread = max(0.0, milliseconds - drafts), None
            if self._is_warm:
                self._costs_of(rows).record(("draft", exit_layer), drafts / num_steps, num_steps)
        if self._is_warm and is_full:
            self._costs_of(rows).record(("verify", width), milliseconds)
            if self._last is not None:
                rest = self._agree((now - self._last) * 1000) - in_pass - self._in_drafts
                self._costs_of(rows).record_rest(max(0.0, rest), has_drafts)
        self._prepared, self._last, self._in_drafts = self._num_prepared(), now, 0.0

    @property
    def _is_warm(self) -> bool:
        return self._num_prepared() == self._prepared


def timestamp(device: torch.device) -> Any:
    """A timestamp on the device, without waiting for it."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
