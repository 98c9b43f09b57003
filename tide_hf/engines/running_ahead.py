"""Passes on a GPU that start before the host has read the last one, where nothing will be drafted."""

from __future__ import annotations

from .step_rows import StepRows
from .steps.static_cache import StaticCacheSlots


class RunningAhead:
    """Whether the next pass has started, and may start, without the host.

    A pass that has run ahead is dropped if there are drafts after all.

    Args:
        is_possible: Whether the host need not see any pass before the next one.
    """

    def __init__(self, is_possible: bool) -> None:
        self._is_possible = is_possible
        self._compactions: int | None = None  # of the cache, when the pass that has run ahead was started
        self.read_at = 0.0  # when the results before it had been read

    @property
    def has_started(self) -> bool:
        """Whether a pass has run ahead."""
        return self._compactions is not None

    def may_start(self, width: int, rows: StepRows, slots: StaticCacheSlots) -> bool:
        """Whether the pass after one over `width` tokens may start: each row's token and slot are then known."""
        most = slots.cache.layers[0].get_max_length()
        return self._is_possible and width == 1 and not rows.is_last_pass and slots.length + 2 <= most

    def start(self, slots: StaticCacheSlots) -> None:
        """Note that the pass has started."""
        self._compactions = slots.num_compactions

    def take(self, slots: StaticCacheSlots) -> bool:
        """Whether the pass that has run ahead is the next one, as it is if the cache was not compacted since."""
        is_next = self._compactions == slots.num_compactions
        if is_next:
            self._compactions = None
        return is_next

    def drop(self, rows: StepRows) -> None:
        """Drop the pass that has run ahead, if one has: it has moved the draft head's hidden states."""
        if self.has_started:
            self._compactions = rows.last_kept = None
