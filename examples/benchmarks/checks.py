"""Token checks: whether what claims to be lossless was, in the runs that were timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FULL_PRECISION = ("float32", "float64")  # below it a wider pass rounds otherwise, and near-ties fall either way


@dataclass(frozen=True)
class Check:
    """One thing that has to hold before a figure may be shown.

    Attributes:
        what: In words.
        passed: Whether it held.
    """

    what: str
    passed: bool


def checks_of_results(part: str, results: Sequence[dict[str, Any]], dtype: str) -> list[Check]:
    """A check for each `Result.to_dict()` that claims the base model's tokens, where rounding explains no other."""
    if dtype not in FULL_PRECISION:
        return []
    return [
        Check(f"{part}: {one['name']} gives the tokens of generate", one["num_equal"] == len(one["prompts"]))
        for one in results
        if one.get("lossless", True)
    ]


def failures(checks: Sequence[Check]) -> list[str]:
    """What did not hold."""
    return [check.what for check in checks if not check.passed]
