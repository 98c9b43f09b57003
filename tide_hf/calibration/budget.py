"""Time: how much is left, and how much of it distillation may have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

WRITING_SHARE = 0.4  # of the whole, for the text that the model writes
SAFETY = 2.0  # what comes after distillation is taken to last this much longer than it should


@dataclass(frozen=True)
class Budget:
    """When a calibration has to be done.

    Attributes:
        started: `perf_counter()` at its start.
        seconds: It may take; infinite where nobody minds.
    """

    started: float
    seconds: float = math.inf

    @classmethod
    def of_minutes(cls, minutes: float | None) -> Budget:
        """A budget that starts now."""
        return cls(perf_counter(), math.inf if minutes is None else 60.0 * minutes)

    @property
    def writing_deadline(self) -> float:
        """When to stop writing text."""
        return self.started + WRITING_SHARE * self.seconds

    def share_of_rest(self, share: float) -> float:
        """When a share of the time that is left will be over."""
        now = perf_counter()
        return now + max(0.0, share * (self.started + self.seconds - now))

    def distillation_deadline(self, seconds_afterwards: float, num_heads: int) -> float:
        """When to stop distilling the next of `num_heads` heads, each of which gets as much.

        Args:
            seconds_afterwards: What has to be done afterwards should take, heads in closed form included.
            num_heads: Heads left to distil.
        """
        now = perf_counter()
        if math.isinf(self.seconds):
            return math.inf
        spare = self.started + self.seconds - now - SAFETY * seconds_afterwards
        return now + max(0.0, spare) / num_heads
