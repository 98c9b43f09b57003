"""Timing of short functions."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


def least_seconds(function: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` timed calls of `function`, in seconds, after one warm-up call."""
    function()
    found = []
    for _ in range(repeats):
        start = perf_counter()
        function()
        found.append(perf_counter() - start)
    return min(found)
