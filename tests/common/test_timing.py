"""How long something short takes."""

from tide_hf.common import timing
from tide_hf.common.timing import least_seconds


def test_the_least_of_the_repeats_without_the_first_call(monkeypatch):
    calls, clock = [], iter([10.0, 15.0, 20.0, 23.0, 30.0, 34.0])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock))
    assert least_seconds(lambda: calls.append(1), 3) == 3.0
    assert len(calls) == 4
