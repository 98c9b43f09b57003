"""Timing of short functions."""

from tide_hf.common import timing
from tide_hf.common.timing import least_seconds


def test_the_shortest_repeat_counts_and_the_first_call_does_not(monkeypatch):
    calls, clock = [], iter([10.0, 15.0, 20.0, 23.0, 30.0, 34.0])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock))
    assert least_seconds(lambda: calls.append(1), 3) == 3.0
    assert len(calls) == 4
