"""N-grams and the hybrid drafter, without a model; and a head that drafts after tokens of another source."""

import random
from itertools import groupby

import pytest
import torch
from drafters import HeadDrafter, cost_table
from families import VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.speculation.answer_memory import AnswerMemory
from tide_hf.speculation.drafters import MAX_NGRAM, HybridDrafter, NgramIndex
from tide_hf.speculation.drafts import Accepted, Draft, num_shared
from tide_hf.speculation.policy import AcceptanceTable, CostTable


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_the_longest_and_latest_match_is_found(tokens, cut):
    index = NgramIndex(tokens[:cut])
    index.extend(tokens[cut:])
    expected = (0, 0)
    for length in range(1, min(MAX_NGRAM, len(tokens)) + 1):
        for position in range(length, len(tokens)):
            if tokens[position - length : position] == tokens[-length:]:
                expected = (length, position)
    assert index.match() == expected


class CountingEngine:
    """An engine whose head counts on from the last token, or from 3, with the same scores in every round."""

    def __init__(self, *scores, head_layer=None, reads_drafts=True):
        self.scores, self.head_layer, self.reads_drafts = scores, head_layer, reads_drafts
        self.drafted, self.unread = [], []

    def draft(self, exit_layer, drafted, num_tokens=1):
        assert exit_layer == 2
        if not self.reads_drafts:
            self.unread.append(num_tokens)
            return [[-1] * num_tokens for _ in drafted], []
        self.drafted.append([len(row) for row in drafted])
        score = self.scores[min(len(self.drafted), len(self.scores)) - 1]
        return [[row[-1] + 1 if row else 3] for row in drafted], [score] * len(drafted)


def pieces(draft):
    """The sources of a chain with their exit layers, and how many tokens each wrote in a row."""
    groups = groupby(draft.nodes, key=lambda node: (node.source, node.exit_layer))
    return [(source, len(list(group)), exit_layer) for (source, exit_layer), group in groups]


CHEAP = {("verify", 1): 10.0, ("verify", 16): 10.0, ("draft", 2): 1.0}
# A pass over five tokens costs as much as one over four, and one over six three times as much.
FIVE_AT_ONCE = {("verify", 1): 10.0, ("verify", 5): 10.0, ("verify", 6): 30.0, ("draft", 2): 0.5}


def drafter(prompts, prior=None, engine=None, milliseconds=CHEAP, **acceptances) -> HybridDrafter:
    """A drafter with a head at exit layer 2 if it has a prior, and the given acceptances (`ngram`, `head`)."""
    table = cost_table(milliseconds, 10)
    one = HybridDrafter(prompts, lambda _: table, {2: prior} if prior else {}, engine)
    if acceptances:
        ngrams = {f"{length}-gram": acceptances["ngram"] for length in range(1, MAX_NGRAM + 1)}
        one.acceptances = AcceptanceTable({**ngrams, "exit layer 2": acceptances["head"]})
    return one


def test_n_grams_draft_from_the_text_of_each_row():
    one = drafter([[1, 2, 3] * 3, [4, 5, 6], [7, 8] * 4])
    first, *others = one.draft([0, 1, 2], [4, 3, 2])
    assert pieces(first) == [("5-gram", 4, 0)]
    assert [draft.tokens for draft in (first, *others)] == [[1, 2, 3, 1], [], [7, 8]]  # also past the text's end
    assert [draft.tokens for draft in one.draft([2, 0], [2, 0])] == [[7, 8], []]
    one.observe(0, first, Accepted([7]))
    assert one.indexes[0].tokens[-1] == 7


@pytest.mark.parametrize(("scores", "expected"), [([0.99], 5), ([0.99, 0.02, 0.9], 2)])
def test_a_low_exit_score_ends_the_drafts_of_a_head(scores, expected):
    engine = CountingEngine(*scores)
    first, second = drafter([[101, 102, 103], [104, 105, 106]], 0.9, engine).draft([0, 1], [5, 1])
    assert first.tokens == list(range(3, 3 + expected))
    assert second.tokens == [3]
    assert first.nodes[0].exit_layer == 2


@pytest.mark.parametrize(("ngram", "by_head"), [(0.1, 3), (0.9, 1)])
def test_n_grams_continue_after_a_head_where_they_are_likelier_accepted(ngram, by_head):
    """The head leads from an end without a match back into known text."""
    prompt = [2, 3, 4, 5, 6, 7, 8, 9, 10, 99]
    (draft,) = drafter([prompt], 0.6, CountingEngine(0.9), ngram=ngram, head=0.6).draft([0], [7])
    assert draft.tokens == [3, 4, 5, 6, 7, 8, 9]
    assert pieces(draft)[0] == ("exit layer 2", by_head, 2)
    assert [node.exit_layer for node in draft.nodes] == [2] * by_head + [0] * (7 - by_head)


REPEATED = [1, 2, 3, 4] * 3


@pytest.mark.parametrize(
    ("engine", "prompts", "limits", "continues"),
    [
        (CountingEngine(0.6), [REPEATED], [15], True),
        (CountingEngine(0.6, reads_drafts=False), [REPEATED], [15], False),
        (CountingEngine(0.6, head_layer=2), [REPEATED], [15], False),  # it needs the token's last hidden state
        (CountingEngine(1.0), [REPEATED, REPEATED], [3, 15], False),
        (CountingEngine(1.0), [REPEATED, [1, 2, 3]], [15, 15], False),  # drafts of unequal lengths
    ],
    ids=["read", "unread", "draft head", "no room", "apart"],
)
def test_a_head_continues_after_n_grams_while_the_pass_has_room(engine, prompts, limits, continues):
    drafts = drafter(prompts, 0.5, engine, FIVE_AT_ONCE, ngram=0.8, head=0.5).draft([*range(len(prompts))], limits)
    assert pieces(drafts[0]) == [("5-gram", 3, 0), *([("exit layer 2", 1, 2)] if continues else [])]
    assert engine.drafted == ([[3]] if continues else [])


def test_a_head_whose_drafts_are_not_read_runs_once():
    engine = CountingEngine(0.9, reads_drafts=False)
    drafts = drafter([[1, 2, 3], [4, 5, 6]], 0.9, engine).draft([0, 1], [5, 1])
    assert [draft.tokens for draft in drafts] == [[-1] * 5, [-1]]
    assert pieces(drafts[0]) == [("exit layer 2", 5, 2)]
    assert (engine.unread, engine.drafted) == ([5], [])


@pytest.mark.parametrize(
    ("n_matches", "expected"),
    [(0, {"5-gram": False, "exit layer 2": None}), (2, {"5-gram": True, "exit layer 2": False})],
)
def test_each_source_is_judged_by_its_own_piece(n_matches, expected):
    one = drafter([[1, 2, 3]], 0.5, CountingEngine(1.0))
    draft = Draft().add([4, 5], "5-gram").add([6], "exit layer 2", 2)
    before = {source: one.acceptances.probability(source) for source in expected}
    one.observe(0, draft, Accepted([4, 5, 7][: n_matches + 1], [*range(n_matches)]))
    for source, rises in expected.items():
        after = one.acceptances.probability(source)
        assert (after == before[source]) if rises is None else ((after > before[source]) == rises)


def test_acceptances_carry_over_to_later_calls_and_return_to_the_prior():
    learned: dict[str, float] = {}

    def new_call():
        return HybridDrafter([[1, 2, 3]], lambda _: CostTable(10), {2: 0.5}, None, learned)

    one = new_call()
    assert learned["exit layer 2"] == 0.5
    for _ in range(20):
        one.observe(0, Draft().add([9], "exit layer 2", 2), Accepted([8]))
    found = learned["exit layer 2"]
    assert found < 0.2
    assert new_call().acceptances.probability("exit layer 2") == pytest.approx(found + 0.05 * (0.5 - found))
    for _ in range(40):
        one = new_call()
    assert learned["exit layer 2"] > 0.4
    one.observe(0, Draft().add([9], "exit layer 2", 2), Accepted([9, 8], [0]))
    assert learned["exit layer 2"] > 0.45


def test_a_rejected_head_is_tried_again_in_the_same_answer():
    one, drafts = drafter([[5]], 0.3, CountingEngine(0.9)), []
    for token in range(100, 200):
        (draft,) = one.draft([0], [15])
        one.observe(0, draft, Accepted([token]))
        drafts.append(bool(draft.tokens))
    assert not all(drafts)
    assert any(drafts[drafts.index(False) :])  # nothing is observed where nothing is drafted
    assert sum(drafts) < 60


NEARLY_FLAT = {("verify", 1): 10.0, ("verify", 2): 10.5, ("verify", 16): 14.0}


def decode(prompt, answer, memory, learned):
    """Decode a known answer, which is then remembered; return the pieces drafted, passes, and wrong draft tokens."""
    table = cost_table(NEARLY_FLAT, 10)
    one, done, drafted, passes, wrong = HybridDrafter([prompt], lambda _: table, {}, None, learned, memory), 1, [], 0, 0
    one.observe(0, Draft(), Accepted(answer[:1]))
    while done < len(answer):
        (draft,) = one.draft([0], [len(answer) - done - 1])
        n_matches = num_shared(draft.tokens, answer[done:])
        new = answer[done : done + n_matches + 1]
        one.observe(0, draft, Accepted(new, [*range(n_matches)]))
        done, passes, drafted = done + len(new), passes + 1, drafted + pieces(draft)
        wrong += len(draft.tokens) - n_matches
    memory.add(prompt, answer)
    return drafted, passes, wrong


def fresh(seed, num_tokens=60):
    """Tokens that no other seed has, but for phrases that repeat within the text."""
    chance = random.Random(seed)
    groups = [[chance.randrange(100), 200 + chance.randrange(3), 300] for _ in range(num_tokens // 3)]
    return [1000 * (seed + 1) + token for group in groups for token in group]


def test_an_answer_that_was_given_before_takes_a_few_passes():
    memory, learned = AnswerMemory(), {}
    texts = [(fresh(seed), fresh(100 + seed)) for seed in range(4)]
    first = [decode(*text, memory, learned) for text in texts]
    again = [decode(*text, memory, learned) for text in texts]
    assert min(passes for _, passes, _ in first) > 40
    assert max(passes for _, passes, _ in again) < 20
    assert again[-1][1] <= 6
    assert sum(wrong for *_, wrong in again) == 0
    assert {source for source, *_ in again[-1][0]} == {"remembered 32-gram"}
    assert decode(*texts[0], AnswerMemory(0), {})[1] == first[0][1]


@pytest.mark.parametrize("num_shared_tokens", [0, 5, 13, 40])
def test_fresh_answers_are_drafted_as_without_a_memory(num_shared_tokens):
    """Also where prompts end alike, or a phrase is common, so that remembered n-grams match but lead elsewhere."""
    found, shared = {}, list(range(num_shared_tokens))
    for max_tokens in (0, 32_768):
        memory, learned = AnswerMemory(max_tokens), {}
        found[max_tokens] = [
            decode(fresh(seed) + shared, [7, *fresh(100 + seed), *range(500, 504), *fresh(200 + seed)], memory, learned)
            for seed in range(20)
        ]
    assert found[0] == found[32_768]
    assert sum(wrong for *_, wrong in found[0]) > 0


def test_a_memory_is_judged_while_it_does_not_draft_and_drafts_once_it_has_been_right():
    memory, prompt, answer = AnswerMemory(), fresh(0), fresh(1)
    memory.add(prompt, answer)
    one, rates, drafts = drafter([prompt], milliseconds=NEARLY_FLAT), [], []
    one.memory = memory
    one.observe(0, Draft(), Accepted(answer[:1]))
    for token in [*answer[1:6], 8, 8, *answer[:20]]:
        drafts += one.draft([0], [15])
        one.observe(0, Draft(), Accepted([token]))
        rates.append(one.acceptances.probability("remembered 32-gram"))
    assert drafts[0].nodes == []
    assert [source for draft in drafts[1:6] for source, *_ in pieces(draft)] == ["remembered 32-gram"] * 5
    assert rates[:5] == sorted(set(rates[:5]))
    assert rates[5] < rates[4]
    assert set(rates[6:]) == {rates[5]}  # what had nothing to offer is not judged


def test_the_row_s_own_n_grams_come_first_unless_remembered_ones_are_likelier_accepted():
    memory = AnswerMemory()
    memory.add([], [1, 2, 3, 4, 5])
    one = drafter([[1, 2, 3, 4, 9, 1, 2, 3, 4]], milliseconds=NEARLY_FLAT)
    one.memory = memory
    sources = {"4-gram": 0.5, "remembered 4-gram": 0.5}
    for other, expected in ((0.5, 9), (0.9, 5), (0.2, 9)):
        one.acceptances = AcceptanceTable(sources | {"remembered 4-gram": other})
        (draft,) = one.draft([0], [1])
        assert draft.tokens == [expected]
    assert one.draft([0], [0]) == [Draft()]


def test_an_answer_that_ends_is_not_drafted_beyond_its_end():
    memory = AnswerMemory()
    memory.add([], [1, 2, 3, 4, 5, 6])
    one = drafter([[1, 2, 3, 4], [7, 8, 9, 7, 8, 9]], milliseconds=NEARLY_FLAT)
    one.memory = memory
    one.acceptances = AcceptanceTable({"remembered 4-gram": 0.9, "3-gram": 0.9})
    assert [draft.tokens for draft in one.draft([0, 1], [5, 5])] == [[5, 6], [7, 8, 9, 7, 8]]


@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("gemma3_text", 2)])
def test_a_head_processes_tokens_of_another_source_together_as_one_by_one(family, rows):
    model, found = tiny_model(family), []
    ids = torch.randint(3, VOCAB, (rows, 8), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    torch.nn.init.normal_(routers[2].router.up.weight)  # so that scores depend on the hidden state
    TIDEModelForCausalLM.attach(model, routers)

    class TwoWays(HeadDrafter):
        """Drafts nothing, but has the head draft after two tokens in both ways."""

        def draft(self, rows, limits):
            others, before = [[5 + row, 9] for row in rows], self.engine.layers_executed
            together = self.engine.draft(2, others)
            assert self.engine.layers_executed - before == 2 * len(rows)
            self.engine._forget_drafts()
            for length in range(3):
                one_by_one = self.engine.draft(2, [tokens[:length] for tokens in others])
            found.append((together, one_by_one))
            return [Draft() for _ in rows]

    model._tide.make_drafter = lambda _, call, engine: TwoWays(call.prompts, engine, 2, 1)
    assert torch.equal(model.generate(ids, **options), expected)
    assert len(found) > 2
    for together, one_by_one in found:
        assert together[0] == one_by_one[0]
        assert together[1] == pytest.approx(one_by_one[1], abs=1e-4)
