"""The drafting policy: measured costs and acceptances in, a decision out."""

import math
import random

import pytest
from interruptions import in_three_threads
from simulated_machine import Machine, costs_of_tokens

from tide_hf.speculation.policy import (
    COMPARABLE,
    FORGET_AFTER,
    MAX_DRAFT,
    STALE,
    AcceptanceTable,
    CostTable,
    Option,
    choose,
    choose_continuation,
    worth_another_draft,
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


def ngrams(*rows) -> Option:
    return Option("n-gram", rows)


def head(*rows, exit_layer=4) -> Option:
    return Option(f"exit layer {exit_layer}", rows, exit_layer)


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
    assert table.resized().verify(3) == table.resized().verify(8)
    assert not worth_another_draft([1.0], 1.0, 7, 0, table, ms_per_token=10.0)
    assert choose([ngrams((0.3, 2))], table).num_draft_tokens == 1  # two tokens would take the step of eight


SURE, NOTHING = (0.9, 15), (0.0, 0)


@pytest.mark.parametrize(
    ("table", "options", "source"),
    [
        (CostTable(30), [ngrams((0.99, 8))], None),  # until plain decoding is measured
        (costs({2: 30.0, 16: 400.0}), [ngrams(SURE)], None),
        (costs({16: 12.0}, {8: 1.0}), [ngrams((0.2, 15)), head((0.8, 4), exit_layer=8)], "exit layer 8"),
        (costs({16: 12.0}, {8: 1.0}), [ngrams((0.2, 15))], "n-gram"),
        (costs({2: 11.0}, {24: 9.0}), [head((0.7, 15), exit_layer=24)], None),
        # A wide pass costs the same however many rows have a draft.
        (costs({2: 13.0, 16: 60.0}), [ngrams(SURE, NOTHING, NOTHING, NOTHING)], None),
        (costs({2: 13.0, 16: 60.0}), [ngrams(SURE, SURE, SURE, NOTHING)], "n-gram"),
        # A draft step is taken to cost its share of the layers, and of the output head the draft vocabulary's.
        (costs(head_share=0.21), [head((0.22, 15))], None),
        (costs(head_share=0.28), [head((0.39, 15), exit_layer=0)], None),
        (costs(head_share=0.28, vocab_share=0.02), [head((0.39, 15), exit_layer=0)], "exit layer 0"),
        (costs(head_share=0.21), [head((0.6, 15))], "exit layer 4"),
    ],
)
def test_the_source_with_the_most_tokens_per_second_drafts(table, options, source):
    choice = choose(options, table)
    assert (choice.option and choice.option.source) == source
    assert choice.num_draft_tokens <= max(limit for option in options for _, limit in option.rows)


def test_a_choice_has_the_expected_cost_of_its_tokens():
    table = costs({8: 12.0}, {4: 1.0})
    choice = choose([head((1.0, 7), (1.0, 7))], table)
    assert choice.num_draft_tokens == 7
    assert choice.ms_per_token == pytest.approx((12.0 + 7 * 1.0) / 16)
    assert choose([ngrams((1.0, 7))], table).ms_per_token == pytest.approx(12.0 / 8)
    assert choose([ngrams((0.5, 2))], costs({3: 10.0})).ms_per_token == pytest.approx(10.0 / 1.75)


@pytest.mark.parametrize(
    ("survivals", "acceptance", "ms_per_token", "catch_up", "expected"),
    [
        ([0.9, 0.1], 1.0, 5.0, False, True),
        ([0.3, 0.1], 1.0, 5.0, False, False),
        ([0.9], 0.2, 10.0, False, False),  # the next one is seldom accepted
        ([0.9], 1.0, 2.0, False, False),  # rounds without it give cheaper tokens
        ([1.0], 0.3, 10.0, False, True),  # 3 ms gained, 2 spent
        ([1.0], 0.3, 10.0, True, False),  # which are 4 on a pass over the tokens so far
        ([1.0], 0.5, 10.0, True, True),
    ],
)
def test_drafting_continues_only_while_it_pays(survivals, acceptance, ms_per_token, catch_up, expected):
    table = costs({4: 20.0, 8: 20.0}, {4: 2.0})
    assert worth_another_draft(survivals, acceptance, 3, 4, table, ms_per_token, catch_up) == expected


STEEP, FLAT = costs({16: 400.0, 3: 26.0, 2: 15.0}), costs({16: 10.0})


@pytest.mark.parametrize(
    ("offers", "survivals", "drafted", "table", "expected"),
    [
        ([(0.9, 5)], [1.0], 0, STEEP, 1),
        ([(0.9, 5)], [0.5], 0, STEEP, 0),  # the draft so far may well be rejected
        ([(0.9, 5)], [1.0], 1, STEEP, 0),  # the next slot costs more
        ([(0.9, 5), NOTHING], [1.0, 1.0], 0, STEEP, 0),  # a pass is of all rows
        ([(0.9, 5), (0.9, 5)], [1.0, 1.0], 0, STEEP, 1),
        ([(0.9, 3), (0.9, 5)], [1.0, 1.0], 0, FLAT, 5),
        ([(0.9, 5)], [1.0], MAX_DRAFT - 2, FLAT, 2),
    ],
)
def test_free_tokens_are_added_while_they_are_worth_a_wider_pass(offers, survivals, drafted, table, expected):
    assert choose_continuation(offers, survivals, drafted, table) == expected


def test_acceptance_counts_up_to_the_first_rejection_and_forgotten_drafts_give_way_to_the_prior():
    table = AcceptanceTable({"a": 0.5, "b": 0.5}, weight=2.0, decay=1.0)
    table.record("a", 5, 1)  # one accepted, one rejected, three that say nothing
    assert table.probability("a") == pytest.approx(2 / 4)
    table.record("a", 2, 2)
    assert table.probability("a") == pytest.approx(4 / 6)
    for _ in range(100):
        table.forget("a", 0.9)
    assert table.probability("a") == pytest.approx(0.5, abs=1e-3)
    assert table.probability("b") == 0.5


def test_on_a_machine_that_slows_down_all_costs_rise():
    table = costs({4: 13.0}, {4: 2.0})
    record(table, 1, 100.0, times=3)
    assert (table.verify(4), table.draft(4)) == (130.0, 20.0)
    record(table, 4, 130.0, times=COMPARABLE)
    record(table, 4, 1300.0, times=20)  # too long after a plain pass to be compared with it
    assert table.verify(4) == 130.0


def test_plain_decoding_is_measured_again_over_time():
    option, table = ngrams((0.9, 8)), costs({4: 12.0})
    record(table, 4, 12.0, times=STALE - 1)
    assert choose([option], table).option is option
    record(table, 4, 12.0, times=1)
    assert choose([option], table).option is None
    record(table, 1, 10.0, times=1)
    assert choose([option], table).option is option


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
            table.resized()

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
    machine = Machine(1.0, 0.4, 0.8, 0.1, 0.03, head=0.2, sharpness=0.9, boast=3.0, copying=0.0, copied=3)
    pauses = []
    costs = costs_of_tokens(random.Random(0), machine, num_answers=2, length=400, change=0.0, pauses=pauses)
    assert 0.5 * len(costs) < sum(pauses) < len(costs)


def test_where_drafts_pay_they_are_made():
    machine = Machine(0.05, 0.02, 0.1, 0.03, 0.03, head=0.7, sharpness=0.5, boast=1.0, copying=0.03, copied=8)
    costs = costs_of_tokens(random.Random(0), machine, num_answers=2, length=160, change=0.0)
    assert sum(costs) < 0.6 * len(costs)
