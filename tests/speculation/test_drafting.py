"""N-grams and the hybrid drafter, without a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_hf.speculation.costs import CostTable
from tide_hf.speculation.drafters import MAX_NGRAM, UNREAD, Draft, HybridDrafter, NgramIndex, Piece
from tide_hf.speculation.policy import AcceptanceTable


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


def drafter(prompts, heads=None, shallow=None):
    table = cheap()
    return HybridDrafter(prompts, lambda _: table, heads or {}, shallow)


def test_no_draft_without_room_or_match():
    assert drafter([[1, 2, 3, 4]]).draft([0], [5])[0].tokens == []
    assert drafter([[1, 2, 1, 2, 1, 2]]).draft([0], [0])[0].tokens == []


def test_n_grams_draft_and_learn():
    one = drafter([[1, 2, 3, 1, 2, 3, 1, 2, 3]])
    (draft,) = one.draft([0], [4])
    assert draft.tokens == [1, 2, 3, 1]
    assert [piece.source for piece in draft.pieces] == ["5-gram"]
    before = one.acceptances.probability("5-gram")
    one.observe(0, draft, [7], 0)
    assert one.acceptances.probability("5-gram") < before
    assert one.indexes[0].tokens[-1] == 7


def test_rows_draft_from_their_own_text():
    drafts = drafter([[1, 2, 3] * 3, [4, 5, 6], [7, 8] * 4]).draft([0, 1, 2], [3, 3, 2])
    assert [draft.tokens for draft in drafts] == [[1, 2, 3], [], [7, 8]]
    (last,) = drafter([[1, 2, 3] * 3, [4, 5, 6], [7, 8] * 4]).draft([2], [2])
    assert last.tokens == [7, 8]


class Shallow:
    block_layer = None
    reads_drafts = True

    def __init__(self, scores):
        self.scores, self.steps, self.rolled_back = scores, 0, False

    def draft(self, exit_layer, tokens):
        assert exit_layer == 2
        assert all(len(row) == self.steps for row in tokens)
        self.steps += 1
        return [50 + self.steps] * len(tokens), [self.scores[self.steps - 1]] * len(tokens)

    def rollback(self):
        self.rolled_back = True


@pytest.mark.parametrize(("scores", "expected"), [([0.99] * 15, 5), ([0.99, 0.02, 0.9, 0.9, 0.9], 2)])
def test_the_router_stops_a_head_that_is_unsure(scores, expected):
    shallow = Shallow(scores)
    drafts = drafter([[1, 2, 3], [4, 5, 6]], {2: 0.9}, shallow).draft([0, 1], [5, 1])
    assert drafts[0].tokens == [51 + position for position in range(expected)]
    assert drafts[1].tokens == [51]
    assert drafts[0].exit_layer_of(0) == 2
    assert shallow.rolled_back


class Fluent:
    """Shallow layers that go on counting, and say how sure they are."""

    def __init__(self, score, block_layer=None, reads_drafts=True):
        self.score, self.fed, self.block_layer = score, [], block_layer
        self.reads_drafts, self.ahead = reads_drafts, []

    def draft(self, exit_layer, tokens):
        self.fed.append([len(row) for row in tokens])
        return [row[-1] + 1 if row else 3 for row in tokens], [self.score] * len(tokens)

    def draft_unread(self, exit_layer, num_tokens):
        self.ahead.append((exit_layer, num_tokens))

    def rollback(self):
        pass


def leading_back(shallow, n_matches):
    """A drafter whose head leads from an end that nothing matches back into known text, and what n-grams were worth."""
    one = drafter([[2, 3, 4, 5, 6, 7, 8, 9, 10, 99]], {2: 0.6}, shallow)
    for length in range(1, MAX_NGRAM + 1):
        for _ in range(20):
            one.acceptances.record(f"{length}-gram", 3, n_matches)
    return one


def test_a_head_goes_on_where_n_grams_are_seldom_right():
    (draft,) = leading_back(Fluent(0.9), 0).draft([0], [7])
    assert draft.tokens == [3, 4, 5, 6, 7, 8, 9]
    assert draft.pieces[0] == Piece("exit layer 2", 3, 2)


def test_n_grams_go_on_where_a_head_stops():
    (draft,) = leading_back(Fluent(0.9), 3).draft([0], [7])
    assert draft.tokens == [3, 4, 5, 6, 7, 8, 9]
    assert draft.pieces[0] == Piece("exit layer 2", 1, 2)
    assert [piece.exit_layer for piece in draft.pieces] == [2, 0]
    assert [draft.exit_layer_of(position) for position in range(3)] == [2, 0, 0]


def test_a_head_goes_on_where_n_grams_stop():
    shallow = Fluent(0.95)
    one = drafter([[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]], {2: 0.9}, shallow)
    one.heads, one.acceptances = [2], AcceptanceTable({"5-gram": 0.95, "exit layer 2": 0.9})
    drafts = [Draft().add([3, 4], "5-gram")]
    one._continue_with_head([0], [4], drafts, [0.9], cheap(), ms_per_token=10.0)
    assert drafts[0].tokens == [3, 4, 5, 6]
    assert drafts[0].pieces == [Piece("5-gram", 2), Piece("exit layer 2", 2, 2)]
    assert shallow.fed == [[2], [3]]


@pytest.mark.parametrize("reads_drafts", [True, False])
def test_a_head_adds_what_a_pass_has_room_for(reads_drafts):
    """A pass over five tokens costs what one over four does, and one over six three times as much."""
    table = CostTable(10)
    for key, milliseconds in {("verify", 1): 10.0, ("verify", 5): 10.0, ("verify", 6): 30.0, ("draft", 2): 0.5}.items():
        for _ in range(6):
            table.record(key, milliseconds)
    shallow = Fluent(0.6, reads_drafts=reads_drafts)
    one = HybridDrafter([[1, 2, 3, 4] * 3], lambda _: table, {2: 0.5}, shallow)
    one.acceptances = AcceptanceTable({**dict.fromkeys(one.learned, 0.8), "exit layer 2": 0.5})
    (draft,) = one.draft([0], [15])
    assert draft.tokens == ([1, 2, 3, 4] if reads_drafts else [1, 2, 3])
    assert draft.pieces == [Piece("5-gram", 3), Piece("exit layer 2", 1, 2)][: 2 if reads_drafts else 1]


def test_a_head_whose_drafts_are_not_read_is_asked_once():
    shallow = Fluent(0.9, reads_drafts=False)
    drafts = drafter([[1, 2, 3], [4, 5, 6]], {2: 0.9}, shallow).draft([0, 1], [5, 1])
    assert [draft.tokens for draft in drafts] == [[UNREAD] * 5, [UNREAD]]
    assert drafts[0].pieces == [Piece("exit layer 2", 5, 2)]
    assert (shallow.ahead, shallow.fed) == ([(2, 5)], [])


def test_a_block_does_not_go_on_behind_n_grams():
    one = drafter([[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]], {2: 0.9}, Fluent(0.95, block_layer=2))
    drafts = [Draft().add([3, 4], "5-gram")]
    one._continue_with_head([0], [4], drafts, [0.9], cheap(), ms_per_token=10.0)
    assert drafts[0].tokens == [3, 4]


@pytest.mark.parametrize(("limits", "lengths"), [([2, 4], (2, 2)), ([4, 4], (2, 1))])
def test_no_head_goes_on_without_room_or_where_rows_stand_apart(limits, lengths):
    one = drafter([[1, 2, 3], [1, 2, 3]], {2: 0.9}, Fluent(1.0))
    drafts = [Draft().add([1] * length, "5-gram") for length in lengths]
    one._continue_with_head([0, 1], limits, drafts, [1.0, 1.0], cheap(), ms_per_token=10.0)
    assert [len(draft.tokens) for draft in drafts] == list(lengths)


@pytest.mark.parametrize(
    ("n_matches", "expected"),
    [(0, {"5-gram": False, "exit layer 2": None}), (2, {"5-gram": True, "exit layer 2": False})],
)
def test_each_source_answers_for_its_own_piece(n_matches, expected):
    one = drafter([[1, 2, 3]], {2: 0.5}, Fluent(1.0))
    draft = Draft().add([4, 5], "5-gram").add([6], "exit layer 2", 2)
    before = {source: one.acceptances.probability(source) for source in expected}
    one.observe(0, draft, [4, 5, 7][: n_matches + 1], n_matches)
    for source, rises in expected.items():
        after = one.acceptances.probability(source)
        assert (after == before[source]) if rises is None else ((after > before[source]) == rises)


def test_a_call_starts_from_what_calls_like_it_found_and_comes_back_to_the_prior():
    learned: dict[str, float] = {}

    def new_call():
        return HybridDrafter([[1, 2, 3]], lambda _: cheap(), {2: 0.5}, None, learned)

    drafter = new_call()
    assert learned["exit layer 2"] == 0.5
    for _ in range(20):
        drafter.observe(0, Draft().add([9], "exit layer 2", 2), [8], 0)
    found = learned["exit layer 2"]
    assert found < 0.2
    assert new_call().acceptances.probability("exit layer 2") == pytest.approx(found + 0.05 * (0.5 - found))
    for _ in range(40):
        drafter = new_call()
    assert learned["exit layer 2"] > 0.4
    drafter.observe(0, Draft().add([9], "exit layer 2", 2), [9, 8], 1)
    assert learned["exit layer 2"] > 0.45


class WrongShallow:
    """A head whose every draft is wrong."""

    block_layer, reads_drafts = None, True

    def draft(self, exit_layer, tokens):
        return [1] * len(tokens), [0.9] * len(tokens)

    def rollback(self):
        pass


def test_a_head_that_failed_a_few_times_is_tried_again_in_the_same_answer():
    drafter = HybridDrafter([[5]], lambda rows: cheap(), {2: 0.3}, WrongShallow())
    drafts = []
    for token in range(100, 200):
        (draft,) = drafter.draft([0], [15])
        drafter.observe(0, draft, [token], 0)
        drafts.append(bool(draft.tokens))
    assert not all(drafts)
    first = drafts.index(False)
    assert any(drafts[first:])  # nothing is observed where nothing is drafted
    assert sum(drafts) < 60
