"""What rounds cost by the engine's clock: draft steps, the pass, and what is done between them."""

import pytest

from tide_hf.engines import round_clock
from tide_hf.engines.round_clock import RoundClock
from tide_hf.speculation.policy import CostTable


@pytest.fixture
def wait(monkeypatch):
    """Let milliseconds pass."""
    now = [100.0]
    monkeypatch.setattr(round_clock, "perf_counter", lambda: now[0])

    def wait(milliseconds):
        now[0] += milliseconds / 1000

    return wait


def plain_round(clock, wait, rest):
    wait(rest)
    clock.begin()
    wait(10)
    clock.end_round(1, rows=1)


def test_what_a_round_takes_besides_its_passes_is_recorded_with_and_without_drafts(wait):
    costs = CostTable(num_layers=30)
    clock = RoundClock(lambda _: costs)
    for rest in (500, 1, 1, 1, 1):  # the first is the prompt's
        plain_round(clock, wait, rest)
    assert costs.rest(False) == pytest.approx(1.0)
    assert costs.rest(True) == costs.rest(False)  # until it is measured
    for _ in range(3):
        wait(2)
        clock.begin()
        wait(4)
        clock.end_draft(15, rows=1)
        wait(1)
        clock.begin()
        wait(12)
        clock.end_round(4, rows=1)
    assert costs.rest(True) == pytest.approx(3.0)
    assert costs.rest(False) == pytest.approx(1.0)
    assert costs.verify(1) == pytest.approx(10.0)


def test_a_round_that_prepared_a_step_says_nothing_of_others(wait):
    costs, prepared = CostTable(num_layers=30), [0]
    clock = RoundClock(lambda _: costs, num_prepared=lambda: prepared[0])
    for _ in range(4):
        plain_round(clock, wait, 1)
    prepared[0] += 1
    plain_round(clock, wait, 400)
    plain_round(clock, wait, 1)
    assert costs.rest(False) == pytest.approx(1.0)
