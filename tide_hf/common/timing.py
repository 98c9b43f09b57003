"""How long something short takes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


def least_seconds(function: Callable[[], object], repeats: int) -> float:
    """The least that calling `function` took in so many repeats; a first call before them is not counted."""
    function()
    found = []
    for _ in range(repeats):
        start = perf_counter()
        function()
        found.append(perf_counter() - start)
    return min(found)
