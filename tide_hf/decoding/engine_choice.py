"""Which engine pays: one that costs nothing to begin with, or one that has to warm up first. Knows no model.

As one who may rent or buy (the ski rental problem), a model starts on the engine that needs no warm-up. It changes when
the warm-up is paid for within the answer that is asked for, or would have been by the answers so far; so it never waits
for more than twice what the best choice would have cost. Whether the other engine is faster is not believed but
measured, and remembered on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..folders import cache_folder, write_whole

EAGER = "eager"
# Of an eager token's time, and seconds, before they are measured: a 135M model on a CPU came to 0.4 to 0.7, and 25 s.
GUESSED_SHARE = {"compiled": 0.6, "cuda_graph": 0.5}
GUESSED_WARM_UP = {"compiled": 30.0, "cuda_graph": 30.0}
WORTH_IT = 0.95  # of an eager token's time; what is closer is noise
MOST_RECORDS = 256
LONGEST_FILE = 2**20
LARGEST_NUMBER = 1e7

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineTimes:
    """What is known of both engines, for one model on one machine.

    Attributes:
        eager_ms: Milliseconds of a plain token on the eager engine; `None` where not measured.
        warmed_ms: The same on the engine that has to warm up.
        warm_up_s: Seconds that its warm-up took.
    """

    eager_ms: float | None = None
    warmed_ms: float | None = None
    warm_up_s: float | None = None


def choose_engine(
    candidate: str | None, times: EngineTimes, *, tokens_ahead: float, tokens_before: int, is_warm: bool
) -> str:
    """The engine of the next call.

    Args:
        candidate: The engine that has to warm up; `None` where none can run.
        times: What is known.
        tokens_ahead: New tokens that the call is expected to make.
        tokens_before: New tokens of earlier calls on the engine without warm-up.
        is_warm: Whether the warm-up is over.
    """
    if candidate is None or times.eager_ms is None:
        return EAGER
    warmed_ms = times.warmed_ms if times.warmed_ms is not None else GUESSED_SHARE[candidate] * times.eager_ms
    if warmed_ms > WORTH_IT * times.eager_ms:
        return EAGER
    if is_warm:
        return candidate
    warm_up = times.warm_up_s if times.warm_up_s is not None else GUESSED_WARM_UP[candidate]
    saved = (times.eager_ms - warmed_ms) / 1000 * max(tokens_ahead, tokens_before)
    return candidate if saved >= warm_up else EAGER


class EngineChooser:
    """Chooses the engine of each call of one model.

    Args:
        records: Where measurements are kept; default: `engines.json` in [`cache_folder`].
    """

    def __init__(self, records: EngineRecords | None = None) -> None:
        self.records = records if records is not None else EngineRecords(cache_folder() / "engines.json")
        self.times: dict[str, EngineTimes] = {}
        self.tokens_before = 0
        self.answers: list[int] = []

    def choose(self, candidate: str | None, key: str, max_new_tokens: int, is_warm: bool) -> str:
        """The engine of a call.

        Args:
            candidate: The engine that has to warm up, if one can run.
            key: Names model, number of rows, machine and versions.
            max_new_tokens: Most tokens of the answer.
            is_warm: Whether that engine's warm-up is over.
        """
        if key not in self.times:
            self.times[key] = self.records.read(key)
        usual = sum(self.answers) / len(self.answers) if self.answers else max_new_tokens
        ahead = min(float(max_new_tokens), usual)
        counts = {"tokens_ahead": ahead, "tokens_before": self.tokens_before}
        return choose_engine(candidate, self.times[key], **counts, is_warm=is_warm)  # type: ignore[arg-type]

    def observe(self, engine: str, key: str, num_tokens: int, plain_ms: float | None, warm_up_s: float) -> None:
        """Learn from a call that is over.

        Args:
            engine: What it ran on.
            key: As for [`choose`].
            num_tokens: New tokens of its longest row.
            plain_ms: Measured milliseconds of a plain token on that engine, if any.
            warm_up_s: Seconds of warm-up so far, on an engine that has one.
        """
        self.answers = [*self.answers, num_tokens][-100:]
        before = self.times.get(key, EngineTimes())
        if engine == EAGER:
            self.tokens_before += num_tokens
            now = replace(before, eager_ms=plain_ms) if plain_ms is not None else before
        else:
            now = replace(before, warmed_ms=plain_ms) if plain_ms is not None else before
            if warm_up_s > 0:
                now = replace(now, warm_up_s=warm_up_s)
        self.times[key] = now
        if _tells_more(before, now):
            self.records.write(key, now)


class EngineRecords:
    """Measurements in a small JSON file, which other processes read and write as well; what is odd in it is ignored.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, key: str) -> EngineTimes:
        """What is known by that key."""
        return _times_of(self._all().get(key))

    def write(self, key: str, times: EngineTimes) -> None:
        """Keep what is known; a folder that cannot be written to keeps nothing."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=1):
                records = self._all()
                records.pop(key, None)
                records[key] = asdict(times)
                kept = dict(list(records.items())[-MOST_RECORDS:])
                write_whole(self.path, json.dumps(kept).encode())
        except (OSError, Timeout) as error:
            logger.info("what engines cost is not remembered: %s", error)

    def _all(self) -> dict[str, Any]:
        try:
            if self.path.stat().st_size > LONGEST_FILE:
                return {}
            records = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return records if isinstance(records, dict) else {}


def key_of(**facts: Any) -> str:
    """A short name of facts that are ready for JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _times_of(found: Any) -> EngineTimes:
    names = ("eager_ms", "warmed_ms", "warm_up_s")
    if not isinstance(found, dict):
        return EngineTimes()
    return EngineTimes(**{name: found[name] for name in names if _is_time(found.get(name))})


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value < LARGEST_NUMBER


def _tells_more(before: EngineTimes, now: EngineTimes) -> bool:
    """Whether something is new, or has changed by more than a tenth."""
    for old, new in zip(asdict(before).values(), asdict(now).values(), strict=True):
        if new is not None and (old is None or abs(new - old) > 0.1 * old):
            return True
    return False
