"""The drafting policy: measured costs and acceptances in, a decision out."""

import math
import random
from dataclasses import replace

import pytest
from interruptions import in_three_threads
from simulated_machine import Machine, costs_of_tokens

from tide_hf import TIDEModelForCausalLM
from tide_hf.speculation.policy import (
    COMPARABLE,
    FORGET_AFTER,
    STALE,
    AcceptanceTable,
    CostTable,
    Prices,
    best_plan,
    best_rate,
    step_gains,
)

PLAIN = ("verify", 1)


def costs(verify=(), draft=(), num_layers=30, **options) -> CostTable:
    """A table with milliseconds by width, and by exit layer, after plain passes of 10 ms."""
    table = CostTable(num_layers, **options)
    record(table, 1, 10.0)
    for width, milliseconds in dict(verify).items():
        record(table, width, milliseconds)
        record(table, 1, 10.0)  # after which costs are recorded
    for exit_layer, milliseconds in dict(draft).items():
        record(table, ("draft", exit_layer), milliseconds)
    return table


def record(table, key, milliseconds, times=6):
    for _ in range(times):
        table.record(key if isinstance(key, tuple) else ("verify", key), milliseconds)


def rows(*promises):
    """What each row promises, as `best_plan` asks for it."""
    return [lambda count, row=row: row[:count] for row in promises]


def planned(table, *promises, drafted_ms=0.0):
    """The width of the best plan."""
    return best_plan(rows(*promises), Prices(table), drafted_ms).width


def test_the_first_measurement_of_a_width_is_no_estimate():
    table = CostTable(30)
    table.record(PLAIN, 1000.0)
    assert not table.ready
    table.record(PLAIN, 30.0)
    assert not table.ready  # it may have been interrupted
    table.record(PLAIN, 10.0)
    assert table.ready
    assert table.verify(1) == 10.0


@pytest.mark.parametrize(
    ("measured", "width", "expected"),
    [
        ({}, 4, 13.0),
        ({4: 25.0}, 2, 15.0),
        ({4: 25.0}, 8, 29.0),
        ({16: 80.0, 8: 24.0, 4: 16.0}, 6, 20.0),  # between its neighbours, in whatever order these were measured
        ({2: 30.0, 3: 12.0}, 2, 12.0),  # a bad measurement must not prevent further ones: a wider pass costs less
        ({4: 8.0}, 2, 8.0),
        ({4: 8.0}, 1, 10.0),  # but plain decoding, the unit of all others, is as measured
    ],
)
def test_unmeasured_widths_are_interpolated(measured, width, expected):
    assert costs(measured).verify(width) == pytest.approx(expected)


def test_a_pass_costs_what_the_step_it_is_padded_to_costs():
    table = costs({2: 10.5, 8: 20.0}, widths=(1, 2, 8))
    assert [table.verify(width) for width in (1, 2, 3, 4, 8)] == [10.0, 10.5, 20.0, 20.0, 20.0]
    assert table.verify(9) == math.inf  # there is no such step
    assert table.resized(0.1).verify(3) == table.resized(0.1).verify(8)
    assert planned(table, [0.3, 0.2]) == 2  # two tokens would take the step of eight
    assert planned(table, [1.0] * 15) == 8


@pytest.mark.parametrize(("slope", "padded"), [(0.1, [1, 2, 4, 8]), (0.001, [1, 16, 16, 16]), (0.005, [1, 2, 4, 16])])
def test_passes_are_as_wide_as_costs_next_to_nothing(slope, padded):
    table = costs(widths=(1, 2, 4, 8, 16), slope=slope)
    assert [table.pass_width(width) for width in (1, 2, 3, 7)] == padded
    assert table.verify(3) == pytest.approx(10.0 * (1.0 + slope * (padded[2] - 1)))


@pytest.mark.parametrize(
    ("rows", "reads_once", "slope"), [(1, True, 0.001), (8, True, 0.008), (999, True, 0.1), (1, False, 0.1)]
)
def test_what_a_wider_pass_is_taken_to_cost_depends_on_the_device(tiny_llama, rows, reads_once, slope):
    attachment = TIDEModelForCausalLM.attach(tiny_llama())._tide
    assert attachment.costs_of(999, "eager", reads_once).slope == 0.1
    assert attachment.costs_of(rows, "eager", reads_once).slope == slope  # also if it has measurements of more rows


SURE, HALF, FALLING = [1.0] * 15, [0.5] * 15, [0.6, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01]


@pytest.mark.parametrize(
    ("table", "promises", "drafted_ms", "width"),
    [
        (costs({2: 30.0, 16: 400.0}), [SURE], 0.0, 1),
        (costs({2: 10.0, 16: 10.0}), [SURE], 0.0, 16),
        (costs({2: 10.0, 16: 10.0}), [SURE[:4]], 0.0, 5),  # as wide as there are nodes
        (costs({2: 10.0, 16: 10.0}), [[], SURE[:4]], 0.0, 5),
        (costs({2: 10.0, 16: 10.0}), [[], []], 0.0, 1),
        (costs({2: 12.0, 3: 14.0, 4: 16.0, 16: 40.0}), [FALLING], 0.0, 3),
        (costs({2: 12.0, 3: 14.0, 4: 16.0, 16: 40.0}), [FALLING, FALLING], 0.0, 3),
        # A wide pass costs the same however many rows promise something.
        (costs({2: 12.0, 3: 14.0, 4: 16.0, 16: 40.0}), [FALLING, [], []], 0.0, 1),
        # The first node alone does not pay, but many do.
        (costs({2: 16.0, 16: 17.0}), [HALF], 0.0, 16),
        # Once a draft step has been paid for, each further node is worth more.
        (costs({2: 12.0, 3: 14.0, 4: 16.0, 16: 40.0}), [FALLING], 20.0, 4),
    ],
)
def test_a_pass_is_as_wide_as_gives_the_most_tokens_per_millisecond(table, promises, drafted_ms, width):
    assert planned(table, *promises, drafted_ms=drafted_ms) == width


def test_a_plan_has_the_expected_rate_of_its_tokens():
    table = costs({8: 12.0})
    assert best_plan(rows(SURE[:7], SURE[:7]), Prices(table), 8.0).rate == pytest.approx(16 / 20)
    assert best_plan(rows([]), Prices(table)).rate == pytest.approx(1 / 10)


def test_the_best_rate_of_known_promises_is_that_of_the_best_plan():
    rng = random.Random(0)
    for _ in range(300):
        ranges = [(width, rng.uniform(8, 30)) for width in rng.sample((2, 3, 4, 6, 8, 12, 16), 3)]
        prices = Prices(costs(verify=((1, 10.0), *ranges)))
        promises = [
            sorted((rng.random() ** 2 for _ in range(rng.randrange(20))), reverse=True)
            for _ in range(rng.randint(1, 3))
        ]
        spent = rng.choice((0.0, 3.0))
        expected = best_plan(rows(*promises), prices, spent).rate
        assert best_rate(promises, prices, spent) == pytest.approx(expected)


def test_further_draft_steps_promise_what_the_head_has_been_right_about():
    (found,) = step_gains([[0.4]], [0.5], [0.6, 0.2], 2)
    assert found == pytest.approx([0.4, 0.3, 0.18, 0.1, 0.06])


def test_acceptance_is_learned_by_source_and_rank_and_forgotten_drafts_give_way_to_the_prior():
    table = AcceptanceTable({("a", 0): 0.5, ("a", 1): 0.5, ("b", 0): 0.5}, weight=2.0, decay=1.0)
    table.record(("a", 0), True)
    table.record(("a", 0), False)
    assert table.probability(("a", 0)) == pytest.approx(2 / 4)
    table.record(("a", 0), True)
    table.record(("a", 0), True)
    assert table.probability(("a", 0)) == pytest.approx(4 / 6)
    assert table.probability(("a", 1)) == 0.5
    for _ in range(100):
        table.forget("a", 0.9)
    assert table.probability(("a", 0)) == pytest.approx(0.5, abs=1e-3)
    assert table.probability(("b", 0)) == 0.5


def test_scores_that_promise_too_much_are_corrected():
    table = AcceptanceTable({("a", 0): 0.5})
    assert table.probability(("a", 0), 0.8) == pytest.approx(0.8)
    for number in range(100):
        table.record(("a", 0), number % 2 == 0, 0.9)
    assert table.probability(("a", 0), 0.9) == pytest.approx(0.5, abs=0.03)
    assert table.probability(("a", 0), 0.3) == pytest.approx(0.17, abs=0.02)


def test_on_a_machine_that_slows_down_all_costs_rise():
    table = costs({4: 13.0}, {4: 2.0})
    record(table, 1, 100.0, times=3)
    assert (table.verify(4), table.draft(4)) == (130.0, 20.0)
    record(table, 4, 130.0, times=COMPARABLE)
    record(table, 4, 1300.0, times=20)  # too long after a plain pass to be compared with it
    assert table.verify(4) == 130.0


def test_plain_decoding_is_measured_again_over_time():
    table = costs({4: 12.0})
    record(table, 4, 12.0, times=STALE - 1)
    assert table.may_draft
    record(table, 4, 12.0, times=1)
    assert not table.may_draft
    record(table, 1, 10.0, times=1)
    assert table.may_draft


def test_unused_costs_are_forgotten_so_that_they_are_tried_again():
    table = costs(draft={5: 50.0}, num_layers=10)
    assert table.draft(5) == 50.0
    record(table, 1, 10.0, times=3 * FORGET_AFTER)
    assert table.draft(5) < 50.0
    record(table, 1, 10.0, times=3 * FORGET_AFTER)
    assert table.draft(5) == 5.0
    assert table.ready


def test_threads_may_share_a_table():
    table = CostTable(num_layers=30)

    def use(stride):
        for number in range(1000):
            table.record(PLAIN, 1.0)
            table.record((("verify", "draft")[number % 2], 2 + stride * number % 397), 2.0)
            table.verify(1 + stride * number % 397)
            table.resized(0.1)

    in_three_threads(use)


# Many machines


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_on_any_machine_drafting_costs_at_most_two_percent_after_32_tokens(seed):
    for number in range(seed, seed + 10):
        rng = random.Random(number)
        later = costs_of_tokens(rng, Machine.drawn(rng), num_answers=5, length=160, change=0.3)[32:]
        assert sum(later) <= 1.02 * len(later), number


def test_on_any_machine_a_first_short_answer_loses_little():
    for number in range(60):
        rng = random.Random(number)
        first = costs_of_tokens(rng, Machine.drawn(rng), num_answers=1, length=64, change=0.0)
        assert sum(first) <= 1.15 * len(first), number


def test_where_drafts_lose_drafting_is_paused_and_nothing_is_drafted_then():
    costly = {"head": 0.45, "sharpness": 0.9, "boast": 3.0, "copying": 0.0, "copied": 3, "first": 2.5}
    machine = Machine(0.5, 0.4, 0.03, 0.1, 0.03, **costly)
    pauses = []
    costs = costs_of_tokens(random.Random(0), machine, num_answers=2, length=400, change=0.0, pauses=pauses)
    assert 0.5 * len(costs) < sum(pauses) < len(costs)


def test_where_drafts_pay_they_are_made():
    machine = Machine(0.05, 0.02, 0.1, 0.03, 0.03, head=0.7, sharpness=0.5, boast=1.0, copying=0.03, copied=8)
    costs = costs_of_tokens(random.Random(0), machine, num_answers=2, length=160, change=0.0)
    assert sum(costs) < 0.6 * len(costs)


def test_where_the_host_takes_what_drafts_gain_drafting_is_paused():
    machine = Machine(0.1, 0.02, 0.1, 0.03, 0.0, head=0.45, sharpness=0.0, boast=1.0, copying=0.0, copied=3)
    lost = {}
    for drafted_rest in (0.0, 0.5):
        slow = replace(machine, drafted_rest=drafted_rest)
        costs = costs_of_tokens(random.Random(0), slow, num_answers=2, length=400, change=0.0)
        lost[drafted_rest] = sum(costs) / len(costs)
    assert lost[0.0] < 0.95
    assert lost[0.5] < 1.02


def test_a_search_that_finds_nothing_counts_as_a_loss():
    machine = Machine(0.3, 0.1, 0.3, 0.0, 0.0, head=0.02, sharpness=0.0, boast=1.0, copying=0.0, copied=3, search=0.1)
    costs = costs_of_tokens(random.Random(0), machine, num_answers=2, length=400, change=0.0)
    assert sum(costs) <= 1.02 * len(costs)
    assert costs.count(1.0) > 0.8 * len(costs)
