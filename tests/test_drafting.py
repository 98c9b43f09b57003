"""N-grams and the hybrid drafter, without a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_hf.drafting import MAX_NGRAM, HybridDrafter, NgramIndex
from tide_hf.policy import CostTable


def cheap() -> CostTable:
    table = CostTable(10)
    for key in [("verify", 1), ("verify", 16), ("draft", 2)]:
        for _ in range(6):
            table.record(key, 1.0 if key == ("draft", 2) else 10.0)
    return table


def test_the_longest_and_latest_match_is_found():
    index = NgramIndex([1, 2, 3, 9, 2, 3, 7, 1, 2, 3])
    assert index.match() == (3, 3)
    assert index.continuation(3, 2) == [9, 2]
    index.extend([9, 8, 3])
    assert index.match() == (1, 10)


def test_a_repeating_text_is_continued_past_its_end():
    index = NgramIndex([4, 5, 4, 5, 4, 5])
    length, position = index.match()
    assert length == 4
    assert index.continuation(position, 5) == [4, 5, 4, 5, 4]


def test_no_match():
    assert NgramIndex([1, 2, 3]).match() == (0, 0)
    assert NgramIndex().match() == (0, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_the_index_finds_what_a_scan_finds(tokens, cut):
    index = NgramIndex(tokens[:cut])
    index.extend(tokens[cut:])
    expected = (0, 0)
    for length in range(1, min(MAX_NGRAM, len(tokens)) + 1):
        for position in range(length, len(tokens)):
            if tokens[position - length : position] == tokens[-length:]:
                expected = (length, position)
    assert index.match() == expected


def test_no_draft_without_room_or_match():
    drafter = HybridDrafter([1, 2, 3, 4], cheap(), {})
    assert drafter.draft(5).tokens == []
    assert HybridDrafter([1, 2, 1, 2, 1, 2], cheap(), {}).draft(0).tokens == []


def test_n_grams_draft_and_learn():
    drafter = HybridDrafter([1, 2, 3, 1, 2, 3, 1, 2, 3], cheap(), {})
    draft = drafter.draft(4)
    assert draft.tokens == [1, 2, 3, 1]
    assert draft.source == "5-gram"
    before = drafter.acceptances.probability("5-gram")
    drafter.observe(draft, [7], 0)
    assert drafter.acceptances.probability("5-gram") < before
    assert drafter.index.tokens[-1] == 7


class Shallow:
    def __init__(self, scores):
        self.scores, self.steps, self.rolled_back = scores, 0, False

    def step(self, exit_layer, tokens):
        assert exit_layer == 2
        assert len(tokens) == self.steps
        self.steps += 1
        return 50 + self.steps, self.scores[self.steps - 1]

    def rollback(self):
        self.rolled_back = True


@pytest.mark.parametrize(("scores", "expected"), [([0.99] * 15, 5), ([0.99, 0.02, 0.9, 0.9, 0.9], 2)])
def test_the_router_stops_a_head_that_is_unsure(scores, expected):
    shallow = Shallow(scores)
    draft = HybridDrafter([1, 2, 3], cheap(), {2: 0.9}, shallow).draft(5)
    assert draft.tokens == [51 + position for position in range(expected)]
    assert draft.exit_layer == 2
    assert shallow.rolled_back
