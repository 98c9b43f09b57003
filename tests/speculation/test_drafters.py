"""The sources of trees and the drafter that merges them, without a model; and a head after tokens of another source."""

import random

import pytest
import torch
from drafters import HeadDrafter, cost_table
from families import VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.speculation.answer_memory import AnswerMemory
from tide_hf.speculation.drafters import HybridDrafter
from tide_hf.speculation.drafts import ROOT, Accepted, Draft
from tide_hf.speculation.growth import GrowingTree, merged
from tide_hf.speculation.sources import CONTINUATIONS, MAX_NGRAM, EarlierAnswers, NgramIndex, Ngrams, Offer, Successors
from tide_hf.speculation.successors import SuccessorTable


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40), st.lists(st.integers(0, 3), max_size=3))
def test_what_followed_the_longest_matches_is_found_the_latest_first(tokens, cut, path):
    index = NgramIndex(tokens[:cut])
    index.extend(tokens[cut:])
    end, expected = (tokens + path)[-MAX_NGRAM:], []
    for length in range(min(MAX_NGRAM, len(end)), 0, -1):
        starts = [i for i in range(length, len(tokens)) if tokens[i - length : i] == end[-length:]]
        after = list(dict.fromkeys(tokens[i] for i in reversed(starts)))[:CONTINUATIONS]
        if len(expected) < CONTINUATIONS:
            known = [token for *_, token in expected]
            expected += [(length, rank, token) for rank, token in enumerate(after) if token not in known]
    assert index.after(path) == expected


def growing(offers, limit=5, is_chain=False):
    """A tree of offers by path, each a token with a probability."""

    def find(path):
        return [Offer(token, "mine", rank, share) for rank, (token, share) in enumerate(offers.get(path, ()))]

    return GrowingTree(limit, find, lambda offer: offer.score, is_chain)


OFFERS = {
    (): [(1, 0.6), (2, 0.3)],
    (1,): [(3, 0.4), (4, 0.3)],
    (2,): [(5, 0.9)],
    (1, 3): [(6, 0.5)],
    (2, 5): [(7, 0.1)],
}


def test_a_tree_grows_by_the_likeliest_path():
    tree = growing(OFFERS)
    assert tree.promised(3) == pytest.approx([0.6, 0.3, 0.27])
    assert tree.promised(9) == pytest.approx([0.6, 0.3, 0.27, 0.24, 0.18, 0.12, 0.027])
    draft = tree.draft(5)
    assert draft.tokens == [1, 2, 5, 3, 4]
    assert [node.parent for node in draft.nodes] == [ROOT, ROOT, 1, 0, 0]
    assert (tree.reach((1, 3)), tree.reach((8,))) == (pytest.approx(0.24), 0.0)
    assert growing(OFFERS, limit=1).draft(9).tokens == [1, 2]
    assert growing(OFFERS, limit=0).draft(9).tokens == []
    assert growing(OFFERS, is_chain=True).draft(9).tokens == [1, 3, 6]


def test_a_tree_grows_anew_with_further_offers():
    tree = growing(OFFERS)
    assert tree.draft(2).tokens == [1, 2]
    tree.add((1,), [Offer(9, "head", 0, 0.95)])
    assert tree.draft(2).tokens == [1, 9]
    assert tree.best_after((1,), 0) == 9
    assert tree.best_after((8,), 0) == 0


def test_of_sources_that_agree_the_surest_counts_and_those_that_differ_leave_each_other_what_remains():
    offers = [Offer(1, "a", 0, 0.6), Offer(1, "b", 0, 0.5), Offer(2, "b", 1, 0.4), Offer(3, "b", 2, 0.001)]
    (first, one), (second, two) = merged(offers, lambda offer: offer.score)
    assert (one.source, one.token, first) == ("a", 1, pytest.approx(0.6))
    assert (two.token, second) == (2, pytest.approx(0.4 * 0.4))
    alone = merged([Offer(1, "a", 0, 0.6), Offer(2, "a", 1, 0.3)], lambda offer: offer.score)
    assert [share for share, _ in alone] == pytest.approx([0.6, 0.3])  # a source's own tokens exclude each other


class CountingEngine:
    """An engine whose head counts on from the last token, or from 3, and as a second choice skips a token."""

    def __init__(self, *scores, head_layer=0, reads_drafts=True, takes_trees=True):
        self.scores, self.head_layer, self.reads_drafts, self.takes_trees = (
            scores,
            head_layer,
            reads_drafts,
            takes_trees,
        )
        self.drafted, self.unread, self.read = [], [], []

    def draft(self, exit_layer, drafted, num_tokens=1):
        assert exit_layer == 0
        if not self.reads_drafts:
            self.unread.append(num_tokens)
            return [[-1] * num_tokens for _ in drafted], []
        self.drafted.append([list(row) for row in drafted])
        score = self.scores[min(len(self.drafted), len(self.scores)) - 1]
        tops = [row[-1] + 1 if row else 3 for row in drafted]
        return [[top, top + 1] for top in tops], [[score, 0.3 * (1 - score)] for _ in drafted]

    def likeliest(self):
        return self.read


CHEAP = {("verify", 1): 10.0, ("verify", 16): 10.0, ("draft", 0): 1.0}
WIDTH_COSTS = {("verify", 1): 10.0, ("verify", 2): 12.0, ("verify", 4): 16.0, ("verify", 16): 60.0, ("draft", 0): 0.5}


def drafter(prompts, prior=None, engine=None, milliseconds=CHEAP, memory=None, table=None, learned=None):
    """A drafter with a head if it has a prior."""
    costs = cost_table(milliseconds, 10)
    sources = [Ngrams(prompts)]
    sources += [EarlierAnswers(prompts, memory)] if memory is not None else []
    sources += [Successors(prompts, table)] if table is not None else []
    heads, engine = {0: prior} if prior else {}, engine or CountingEngine(0.5)
    return HybridDrafter(sources, lambda _: costs, heads, engine, learned, table)


def test_n_grams_draft_from_the_text_of_each_row():
    one = drafter([[1, 2, 3] * 3, [4, 5, 6], [7, 8] * 4])
    first, *others = one.draft([0, 1, 2], [4, 3, 2])
    assert {node.source for node in first.nodes} == {"5-gram"}
    assert [draft.tokens for draft in (first, *others)] == [[1, 2, 3, 1], [], [7, 8]]  # also past the text's end
    assert [draft.tokens for draft in one.draft([2, 0], [2, 0])] == [[7, 8], []]
    one.observe(0, first, Accepted([7]))
    assert one.sources[0].indexes[0].tokens[-1] == 7


@pytest.mark.parametrize(("scores", "steps"), [([0.99], 3), ([0.99, 0.02], 2)])
def test_a_low_score_ends_the_drafts_of_a_head(scores, steps):
    engine = CountingEngine(*scores)
    first, second = drafter([[101, 102, 103], [104, 105, 106]], 0.9, engine, WIDTH_COSTS).draft([0, 1], [5, 1])
    assert len(engine.drafted) == steps
    assert first.tokens[0] == 3
    assert second.chain().tokens == [3]
    assert first.nodes[0].source == "draft head"


def test_one_draft_step_gives_several_nodes_and_a_chain_where_trees_cannot_be_verified():
    (tree,) = drafter([[101, 102]], 0.5, CountingEngine(0.5)).draft([0], [15])
    assert [node.token for node in tree.nodes if node.parent == ROOT] == [3, 4]
    (chain,) = drafter([[101, 102]], 0.5, CountingEngine(0.5, takes_trees=False)).draft([0], [15])
    assert chain.is_chain
    assert chain.tokens[:2] == [3, 4]


def test_a_head_goes_on_along_the_likeliest_path_whoever_offers_it():
    prompt = [5, 6, 7, 8, 60, 1, 5, 6, 7, 8]
    engine = CountingEngine(0.2)
    (draft,) = drafter([prompt], 0.9, engine, CHEAP | {("draft", 0): 0.1}).draft([0], [9])
    assert engine.drafted[:2] == [[[]], [[60]]]  # what the 4-gram offers, and the head's own tokens beside it
    roots = {node.token: node.source for node in draft.nodes if node.parent == ROOT}
    assert (roots[60], roots[3]) == ("4-gram", "draft head")


def test_a_head_does_not_draft_where_other_sources_are_sure():
    engine = CountingEngine(0.6)
    (draft,) = drafter([[1, 2, 3, 4] * 4], 0.3, engine, learned={("5-gram", 0): 0.97}).draft([0], [15])
    assert engine.drafted == []
    assert draft.tokens == [1, 2, 3, 4] * 3 + [1, 2, 3]


def test_a_head_whose_drafts_are_not_read_runs_once():
    engine = CountingEngine(0.9, reads_drafts=False)
    one = drafter([[1, 2, 3], [4, 5, 6]], 0.9, engine)
    drafts = one.draft([0, 1], [5, 1])
    assert [draft.tokens for draft in drafts] == [[-1] * 5, [-1]]
    assert (engine.unread, engine.drafted) == ([5], [])
    before = one.acceptances.probability(("draft head", 0))
    one.observe(0, drafts[0].with_tokens([7, 8, 9, 9, 9]), Accepted([7, 8, 1], [0, 1]))
    one.observe(1, drafts[1].with_tokens([7]), Accepted([7, 1], [0]))
    assert one.acceptances.probability(("draft head", 0)) != before


def test_what_sources_offer_is_judged_along_the_accepted_path_drafted_or_not():
    one = drafter([[1, 2, 9, 1, 3, 9, 1]], milliseconds={("verify", 1): 10.0, ("verify", 16): 100.0})
    keys = [("2-gram", 0), ("1-gram", 0), ("1-gram", 1)]
    before = [one.acceptances.probability(key) for key in keys]
    (draft,) = one.draft([0], [5])
    assert draft.nodes == []
    one.observe(0, draft, Accepted([3]))  # as the 2-gram (9, 1) says; the 1-gram's other token, 2, is wrong
    after = [one.acceptances.probability(key) for key in keys]
    assert after[0] > before[0]
    assert after[1] == before[1]  # it offered what the longer match did
    assert after[2] < before[2]


def test_acceptances_carry_over_to_later_calls_and_return_to_the_prior():
    learned, key = {}, ("draft head", 0)

    def new_call():
        return drafter([[101, 102]], 0.5, CountingEngine(0.6), learned=learned)

    one = new_call()
    assert learned[key] == 0.5
    for _ in range(20):
        (draft,) = one.draft([0], [1])
        one.observe(0, draft, Accepted([8]))
    found = learned[key]
    assert found < 0.45
    assert new_call().acceptances.probability(key) == pytest.approx(found + 0.05 * (0.5 - found))
    for _ in range(40):
        new_call()
    assert learned[key] > 0.4


def test_a_rejected_head_is_tried_again_in_the_same_answer():
    one, drafts = drafter([[5]], 0.3, CountingEngine(0.9), WIDTH_COSTS), []
    for token in range(100, 300, 2):
        (draft,) = one.draft([0], [15])
        one.observe(0, draft, Accepted([token]))
        drafts.append(bool(draft.tokens))
    assert not all(drafts)
    assert any(drafts[drafts.index(False) :])  # nothing is observed where nothing is drafted
    assert sum(drafts) < 60


def test_successors_are_taken_from_passes_and_offered_after_their_token():
    table, engine = SuccessorTable(), CountingEngine(0.5)
    engine.read = [([5, 6], [[7, 8], [9]])]
    one = drafter([[1, 5]], None, engine, table=table)
    assert one.draft([0], [3]) == [Draft()]
    one.observe(0, Draft(), Accepted([5]))
    assert (table.after(5), table.after(6), table.after(1)) == ((7, 8), (9,), ())
    (draft,) = one.draft([0], [3])
    assert [(node.token, node.source) for node in draft.nodes[:2]] == [(7, "successor"), (8, "successor")]


def test_successors_are_bounded_and_those_read_last_stay():
    table = SuccessorTable(2)
    for token in (1, 2, 1, 3):
        table.see([token], [[token + 10]])
    assert [table.after(token) for token in (1, 2, 3)] == [(11,), (), (13,)]
    table.clear()
    assert len(table) == 0
    off = SuccessorTable(0)
    off.see([1], [[2]])
    assert len(off) == 0


NEARLY_FLAT = {("verify", 1): 10.0, ("verify", 2): 10.5, ("verify", 16): 14.0}


def decode(prompt, answer, memory, learned):
    """Decode a known answer, which is then remembered; return the sources drafted from, and passes."""
    one, done, sources, passes = drafter([prompt], None, None, NEARLY_FLAT, memory, learned=learned), 1, set(), 0
    one.observe(0, Draft(), Accepted(answer[:1]))
    while done < len(answer):
        (draft,) = one.draft([0], [len(answer) - done - 1])
        path, node = [], ROOT
        while (
            node := next((i for i in draft.children(node) if draft.nodes[i].token == answer[done + len(path)]), None)
        ) is not None:
            path.append(node)
        new = answer[done : done + len(path) + 1]
        one.observe(0, draft, Accepted(new, path))
        done, passes, sources = done + len(new), passes + 1, sources | {draft.nodes[i].source for i in path}
    memory.add(prompt, answer)
    return sources, passes


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
    assert min(passes for _, passes in first) > 30
    assert max(passes for _, passes in again) < 20
    assert again[-1][1] <= 6
    assert "remembered 32-gram" in again[-1][0]


@pytest.mark.parametrize("num_shared_tokens", [0, 5, 13, 40])
def test_fresh_answers_take_as_many_passes_as_without_a_memory(num_shared_tokens):
    """Also where prompts end alike, or a phrase is common, so that remembered n-grams match but lead elsewhere."""
    found, shared = {}, list(range(num_shared_tokens))
    for max_tokens in (0, 32_768):
        memory, learned = AnswerMemory(max_tokens), {}
        found[max_tokens] = sum(
            decode(
                fresh(seed) + shared, [7, *fresh(100 + seed), *range(500, 504), *fresh(200 + seed)], memory, learned
            )[1]
            for seed in range(20)
        )
    assert found[32_768] <= 1.01 * found[0]


def test_an_answer_that_ends_is_not_drafted_beyond_its_end():
    memory = AnswerMemory()
    memory.add([], [1, 2, 3, 4, 5, 6])
    learned = {("remembered 4-gram", 0): 0.9, ("3-gram", 0): 0.9}
    one = drafter([[1, 2, 3, 4], [7, 8, 9, 7, 8, 9]], None, None, NEARLY_FLAT, memory, learned=learned)
    assert [draft.chain().tokens for draft in one.draft([0, 1], [5, 5])] == [[5, 6], [7, 8, 9, 7, 8]]


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
        assert torch.allclose(torch.tensor(together[1]), torch.tensor(one_by_one[1]), atol=1e-4)
