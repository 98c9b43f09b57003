"""Steps on a GPU that start before the host has read the last pass: a pass without drafts, or the head's drafts."""

from __future__ import annotations

from collections.abc import Sequence

from .step_rows import StepRows
from .steps.static_cache import StaticCacheSlots
from .steps.step_tensors import WIDEST

Plan = tuple[int, int]  # the exit layer of draft steps, and how many there are
PLAIN: Plan = (0, 0)  # a pass without drafts


class RunningAhead:
    """Whether steps of the next round have started, and may start, without the host.

    They are dropped if the next round has another plan after all.

    Args:
        is_possible: Whether the host need not see any pass before the next one.
    """

    def __init__(self, is_possible: bool) -> None:
        self._is_possible = is_possible
        # What has run ahead, of which cache: the number of its compactions, and its length once the host has read it.
        self._started: tuple[Plan, int, int] | None = None
        self._last_plan = PLAIN
        self.read_at = 0.0  # when the results before it had been read

    @property
    def has_started(self) -> bool:
        """Whether steps have run ahead."""
        return self._started is not None

    def may_start(self, plan: Plan, width: int, rows: StepRows, slots: StaticCacheSlots) -> bool:
        """Whether `plan`, that of the last pass, over `width` tokens, may start again; to be asked once a round.

        Each row's token and slot are then known on the device. Draft steps start from the second round of a plan on.
        """
        is_usual, self._last_plan = plan == self._last_plan, plan
        added = 1 + plan[1]  # at most
        if plan == PLAIN:
            is_known, needed = width == 1, 1
        else:
            is_known, needed = is_usual and rows.num_rows == 1 and slots.rejected is None, WIDEST
        has_room = slots.length + added + needed <= slots.cache.layers[0].get_max_length()
        return self._is_possible and is_known and has_room and rows.may_add(2 * added)

    def start(self, plan: Plan, slots: StaticCacheSlots, found: Sequence[int]) -> None:
        """Note that `plan` has started, after a pass of whose first row `StepTensors.read` has `found` this."""
        num_right = next((i for i in range(plan[1]) if found[i] != found[WIDEST + 1 + i]), plan[1])
        self._started = plan, slots.num_compactions, slots.length + 1 + num_right

    def take(self, plan: Plan, slots: StaticCacheSlots) -> bool:
        """Whether what has run ahead is the next plan, after as many tokens as were accepted, and none has moved."""
        is_next = self._started == (plan, slots.num_compactions, slots.length)
        if is_next:
            self._started = None
        return is_next

    def drop(self, rows: StepRows) -> None:
        """Drop what has run ahead, if anything has: the device has moved on the draft head's hidden state itself."""
        if self.has_started:
            self._started = rows.last_kept = None
