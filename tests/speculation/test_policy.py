"""The drafting policy: pure functions of costs and acceptances."""

import math
import random
import sys
import threading

import pytest

from tide_hf.speculation.costs import COMPARABLE, FORGET_AFTER, SAMPLES, STALE, CostTable
from tide_hf.speculation.policy import (
    MAX_DRAFT,
    AcceptanceTable,
    Option,
    choose,
    choose_continuation,
    expected_tokens,
    worth_another_draft,
)


def costs(samples: dict, num_layers: int = 30) -> CostTable:
    table = CostTable(num_layers)
    for key, milliseconds in samples.items():
        for _ in range(6):
            table.record(key, milliseconds)
    return table


def test_expected_tokens():
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)


def test_plain_decoding_until_it_is_measured():
    assert choose([Option("n-gram", ((0.99, 8),))], CostTable(30)).option is None


def test_the_first_sample_of_a_width_is_dropped():
    table = CostTable(30)
    table.record(("verify", 1), 1000.0)
    assert not table.ready
    table.record(("verify", 1), 10.0)
    assert table.ready
    assert table.verify(1) == 10.0


def test_unmeasured_widths_are_tried_and_measured_ones_believed():
    table = costs({("verify", 1): 10.0})
    assert table.verify(2) == pytest.approx(11.0)
    assert table.verify(4) == pytest.approx(13.0)
    table = costs({("verify", 1): 10.0, ("verify", 4): 25.0})
    assert table.verify(4) == 25.0
    assert table.verify(2) == pytest.approx(15.0)
    assert table.verify(8) == pytest.approx(29.0)
    table = costs({("verify", 1): 10.0, ("verify", 16): 80.0, ("verify", 8): 24.0, ("verify", 4): 16.0})
    assert table.verify(6) == pytest.approx(20.0)  # between its neighbours, in whatever order these were measured


def test_a_pass_costs_what_the_step_costs_that_it_is_filled_up_to():
    table = CostTable(30, widths=(1, 2, 8))
    for width, milliseconds in ((1, 10.0), (2, 10.5), (8, 20.0)):
        for _ in range(6):
            table.record(("verify", width), milliseconds)
    assert [table.verify(width) for width in (1, 2, 3, 4, 8)] == [10.0, 10.5, 20.0, 20.0, 20.0]
    assert table.verify(9) == math.inf  # there is no such step
    assert table.resized().verify(3) == table.resized().verify(8)
    assert not worth_another_draft([1.0], 1.0, 7, 0, table, ms_per_token=10.0)
    offer = Option("n-gram", ((0.3, 2),))  # two tokens would take the step of eight
    assert choose([offer], table).num_assistant_tokens == 1


def test_one_bad_sample_does_not_settle_a_width():
    table = costs({("verify", 1): 10.0})
    table.record(("verify", 2), 0.0)
    table.record(("verify", 2), 90.0)
    assert table.verify(2) == pytest.approx((90.0 + 11.0) / 2)  # as if what is expected had been measured as well
    for _ in range(5):
        table.record(("verify", 2), 12.0)
    assert table.verify(2) == 12.0


def test_it_turns_itself_off_when_verification_costs_too_much():
    table = costs({("verify", 1): 10.0, ("verify", 2): 30.0, ("verify", 16): 400.0})
    assert choose([Option("n-gram", ((0.9, 15),))], table).option is None


def test_it_comes_back_when_the_text_becomes_predictable():
    table = costs({("verify", 1): 10.0, ("verify", 2): 14.0, ("verify", 16): 30.0})
    acceptances = AcceptanceTable({"3-gram": 0.5})

    def choice():
        return choose([Option("n-gram", ((acceptances.probability("3-gram"), 15),))], table)

    for _ in range(10):
        acceptances.record("3-gram", 3, 0)
    assert choice().option is None
    for _ in range(10):
        acceptances.record("3-gram", 3, 3)
    assert choice().option.source == "n-gram"
    assert choice().num_assistant_tokens > 3


def test_the_better_source_wins_and_the_limit_holds():
    table = costs({("verify", 1): 10.0, ("verify", 16): 12.0, ("draft", 8): 1.0})
    options = [Option("n-gram", ((0.2, 15),)), Option("exit layer 8", ((0.8, 4),), exit_layer=8)]
    choice = choose(options, table)
    assert choice.option.source == "exit layer 8"
    assert choice.num_assistant_tokens <= 4
    assert choose(options[:1], table).option.source == "n-gram"


def test_a_batch_drafts_where_its_rows_together_gain():
    """A wide pass costs the same however many rows have something to offer."""
    table = costs({("verify", 1): 10.0, ("verify", 2): 13.0, ("verify", 16): 60.0})
    sure, nothing = (0.9, 15), (0.0, 0)
    assert choose([Option("n-gram", (sure, nothing, nothing, nothing))], table).option is None
    assert choose([Option("n-gram", (sure, sure, sure, nothing))], table).option is not None


def test_an_expensive_head_is_not_asked():
    table = costs({("verify", 1): 10.0, ("verify", 2): 11.0, ("draft", 24): 9.0})
    assert choose([Option("exit layer 24", ((0.7, 15),), exit_layer=24)], table).option is None


def test_a_head_that_cannot_pay_is_not_even_tried():
    """The output head costs a draft step as much as a pass, whatever the depth; a small model's is a fifth of it."""
    options = [Option("exit layer 4", ((0.22, 15),), exit_layer=4)]
    plain = [(("verify", 1), 10.0)] * 6
    shares = {}
    for share in (0.0, 0.21):
        table = CostTable(30, head_share=share)
        for key, milliseconds in plain:
            table.record(key, milliseconds)
        shares[share] = choose(options, table).option is not None
        assert table.draft(4) == pytest.approx(10 * (share + (1 - share) * 4 / 30))
    assert shares == {0.0: False, 0.21: False}
    assert choose([Option("exit layer 4", ((0.6, 15),), exit_layer=4)], table).option is not None


def test_drafting_goes_on_only_while_it_pays():
    table = costs({("verify", 1): 10.0, ("verify", 8): 11.0, ("draft", 4): 2.0})
    assert worth_another_draft([0.9], 1.0, 1, 4, table, ms_per_token=10.0)
    assert not worth_another_draft([0.1], 1.0, 1, 4, table, ms_per_token=10.0)
    assert worth_another_draft([0.9, 0.1], 1.0, 1, 4, table, ms_per_token=5.0)
    assert not worth_another_draft([0.3, 0.1], 1.0, 1, 4, table, ms_per_token=5.0)
    assert not worth_another_draft([0.9], 0.2, 1, 4, table, ms_per_token=10.0)  # the next one is seldom right
    assert not worth_another_draft([0.9], 1.0, 1, 4, table, ms_per_token=2.0)  # rounds without it give cheaper tokens


def test_a_head_that_has_to_catch_up_pays_for_what_it_has_not_seen():
    table = costs({("verify", 1): 10.0, ("verify", 4): 20.0, ("verify", 8): 20.0, ("draft", 4): 2.0})
    assert worth_another_draft([1.0], 0.3, 3, 4, table, ms_per_token=10.0)  # 3 ms gained, 2 spent
    assert not worth_another_draft([1.0], 0.3, 3, 4, table, ms_per_token=10.0, catch_up=True)  # on a pass over 4
    assert worth_another_draft([1.0], 0.5, 3, 4, table, ms_per_token=10.0, catch_up=True)


def test_free_tokens_are_added_while_they_are_worth_a_wider_pass():
    table = costs({("verify", 1): 10.0, ("verify", 16): 400.0, ("verify", 3): 26.0, ("verify", 2): 15.0})
    sure, nothing = (0.9, 5), (0.0, 0)
    assert choose_continuation((sure,), [1.0], 0, table) == 1
    assert choose_continuation((sure,), [0.5], 0, table) == 0  # what was drafted so far may well be wrong
    assert choose_continuation((sure,), [1.0], 1, table) == 0  # the next slot is dearer
    assert choose_continuation((sure, nothing), [1.0, 1.0], 0, table) == 0  # a pass is of all rows
    assert choose_continuation((sure, sure), [1.0, 1.0], 0, table) == 1
    flat = costs({("verify", 1): 10.0, ("verify", 16): 10.0})
    assert choose_continuation(((0.9, 3), (0.9, 5)), [1.0, 1.0], 0, flat) == 5
    assert choose_continuation((sure,), [1.0], MAX_DRAFT - 2, flat) == 2


def test_a_choice_says_what_its_tokens_cost():
    table = costs({("verify", 1): 10.0, ("verify", 8): 12.0, ("draft", 4): 1.0})
    choice = choose([Option("head", ((1.0, 7), (1.0, 7)), exit_layer=4)], table)
    assert choice.num_assistant_tokens == 7
    assert choice.ms_per_token == pytest.approx((12.0 + 7 * 1.0) / 16)
    table.head_share = 0.2
    choice = choose([Option("n-gram", ((1.0, 7),))], table)
    assert choice.ms_per_token == pytest.approx(12.0 / 8)  # no layer and no head runs for its drafts


def test_acceptance_counts_up_to_the_first_rejection():
    table = AcceptanceTable({"a": 0.5}, weight=2.0, decay=1.0)
    table.record("a", 5, 1)  # one accepted, one rejected, three that say nothing
    assert table.probability("a") == pytest.approx(2 / 4)
    table.record("a", 2, 2)
    assert table.probability("a") == pytest.approx(4 / 6)


def test_a_narrow_pass_is_never_taken_to_cost_more_than_a_wider_one():
    """An unlucky measurement must not keep a width from being used again."""
    costs = CostTable(10)
    for key, milliseconds in {("verify", 1): 10.0, ("verify", 2): 30.0, ("verify", 3): 12.0}.items():
        for _ in range(6):
            costs.record(key, milliseconds)
    assert costs.verify(2) == costs.verify(3) == 12.0
    assert costs.verify(1) == 10.0
    for _ in range(6):
        costs.record(("verify", 4), 8.0)
    assert (costs.verify(2), costs.verify(1)) == (8.0, 10.0)  # but for plain decoding, by which all are measured


def test_a_machine_that_slows_down_slows_everything_down():
    table = costs({("verify", 1): 10.0, ("verify", 4): 13.0, ("draft", 4): 2.0})
    for _ in range(3):
        table.record(("verify", 1), 100.0)
    assert (table.verify(4), table.draft(4)) == (130.0, 20.0)
    for _ in range(6):
        table.record(("verify", 4), 140.0)
    assert table.verify(4) == pytest.approx(135.0, abs=5.1)


def test_what_plain_decoding_takes_is_told_once_it_is_known():
    table = CostTable(10)
    for milliseconds in (1000.0, 10.0, 12.0, 11.0):
        table.record(("verify", 1), milliseconds)
        assert table.plain is None
    table.record(("verify", 1), 13.0)
    assert table.plain == pytest.approx(11.5)
    for milliseconds in [10.0] * 2 * SAMPLES + [100.0] * (SAMPLES // 2 + 1):
        table.record(("verify", 1), milliseconds)
    assert table.plain == 100.0  # of late
    assert table.resized().plain is None


def test_plain_decoding_is_measured_again_by_and_by():
    option = Option("n-gram", ((0.9, 8),))
    table = costs({("verify", 1): 10.0, ("verify", 4): 12.0})
    for _ in range(STALE - 7):
        table.record(("verify", 4), 12.0)
    assert choose([option], table).option is option
    table.record(("verify", 4), 12.0)
    assert choose([option], table).option is None
    table.record(("verify", 1), 10.0)
    assert choose([option], table).option is option


def test_passes_long_after_a_plain_one_say_nothing_about_costs():
    table = costs({("verify", 1): 10.0, ("verify", 4): 12.0})
    for _ in range(COMPARABLE):
        table.record(("verify", 4), 12.0)
    for _ in range(20):
        table.record(("verify", 4), 120.0)
    assert table.verify(4) == 12.0


def test_costs_that_are_not_used_are_forgotten_and_tried_again():
    costs = CostTable(10)
    for _ in range(6):
        costs.record(("verify", 1), 10.0)
        costs.record(("draft", 5), 50.0)
    assert costs.draft(5) == 50.0
    for _ in range(3 * FORGET_AFTER):
        costs.record(("verify", 1), 10.0)
    assert costs.draft(5) < 50.0
    for _ in range(3 * FORGET_AFTER):
        costs.record(("verify", 1), 10.0)
    assert costs.draft(5) == 5.0
    assert costs.ready


def test_what_is_forgotten_gives_way_to_the_prior():
    table = AcceptanceTable({"a": 0.4, "b": 0.5})
    table.record("a", 9, 0)
    table.record("a", 9, 0)
    low = table.probability("a")
    assert low < 0.3
    for _ in range(100):
        table.forget("a", 0.9)
    assert table.probability("a") == pytest.approx(0.4, abs=1e-3)
    assert table.probability("b") == 0.5


def test_threads_may_share_a_table():
    """What one of them looks through another may add to meanwhile."""
    table, problems, interval = CostTable(num_layers=30), [], sys.getswitchinterval()

    def use(seed):
        numbers = random.Random(seed)
        try:
            for _ in range(3000):
                table.record(("verify", 1), 1.0)
                table.record((numbers.choice(["verify", "draft"]), numbers.randrange(2, 400)), 2.0)
                table.verify(numbers.randrange(1, 400))
                table.resized()
        except (RuntimeError, ValueError, LookupError) as error:
            problems.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert problems == []
