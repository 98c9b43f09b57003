"""Drafts as trees, and rules that accept other tokens than the exact one."""

import pytest
import torch
from families import VOCAB, tiny_model
from on_steps import ATTACH, OPTIONS, new_tokens, prompts

from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError
from tide_hf.common.token_sources import FULL_PASS
from tide_hf.engines.steps.step_tensors import WIDEST
from tide_hf.speculation.acceptance import ExactAcceptance
from tide_hf.speculation.drafts import ROOT, Accepted, Draft


def tree():
    """5 -> (7, likelier 8 -> 9), and 6 beside the 5."""
    draft = Draft().add([5, 7], "a", probability=0.5)
    return draft.add([6], "b", parent=ROOT, probability=0.3).add([8, 9], "b", 2, parent=0, probability=0.6)


def test_nodes_know_what_they_follow():
    draft = tree()
    assert draft.tokens == [5, 7, 6, 8, 9]
    assert [draft.children(node) for node in (ROOT, 0, 1, 3)] == [[0, 2], [1, 3], [], [4]]
    assert [node.exit_layer for node in draft.nodes] == [0, 0, 0, 2, 2]


def test_the_chain_goes_on_with_the_likeliest_child():
    chain = tree().chain()
    assert (chain.tokens, [node.parent for node in chain.nodes]) == ([5, 8, 9], [ROOT, 0, 1])
    assert chain.chain() is chain


def test_a_branch_goes_on_from_any_node():
    assert [tree().branch(node) for node in (ROOT, 0, 2)] == [[0, 3, 4], [3, 4], []]


def test_after_siblings_the_parent_has_to_be_named():
    with pytest.raises(ConfigurationError, match=r"Pass parent="):
        tree().add([1], "a")


def test_new_tokens_have_the_sources_of_the_path():
    assert Accepted([5, 8, 1], [0, 3]).sources(tree()) == ["a", "b", FULL_PASS]


def test_the_kv_of_the_path_stay_and_those_of_padding_that_an_ended_row_adds():
    assert Accepted([5, 8, 1], [0, 3]).kept == [0, 1, 4]
    assert Accepted([5, 8], [0, 3]).kept == [0, 1]  # the answer ends with a draft token, which no pass reads again
    assert Accepted([5, 0, 0], [0]).kept == [0, 1, 2]
    assert Accepted().kept == []
    assert tree().parents(8) == [-1, 0, 1, 0, 1, 4, 0, 0]


class Siblings:
    """Drafts too long a chain, of which the first token is right, beside a sibling."""

    def __init__(self, right):
        self.right, self.done, self.verified = right, [0] * len(right), []

    def draft(self, rows, limits):
        drafts = []
        for row, limit in zip(rows, limits, strict=True):
            tokens = [*self.right[row][self.done[row] :][:1], *[3] * WIDEST][:limit]
            drafts.append(Draft().add(tokens, "mine").add([9][:limit], "mine", parent=ROOT, probability=0.1))
        return drafts

    def observe(self, row, draft, accepted):
        self.done[row] += len(accepted.tokens)
        self.verified.append(draft.tokens)


@pytest.mark.parametrize("engine", ATTACH)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_tree_or_its_likeliest_branch_is_verified_as_far_as_passes_reach(rows, engine):
    model, batch = tiny_model("llama"), prompts(rows)
    expected = model.generate(**batch, **OPTIONS)
    ATTACH[engine](model)
    drafter = Siblings(new_tokens(expected))
    model._tide.make_drafter = lambda *_: drafter
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert "mine" in model.last_exit_stats.sources[0]
    assert engine == "eager" or max(map(len, drafter.verified)) < WIDEST
    assert any(9 in tokens[1:] for tokens in drafter.verified) == (engine != "captured")


@pytest.mark.parametrize("engine", ATTACH)
def test_a_head_that_is_not_there_cannot_draft(engine):
    model = tiny_model("llama")
    ATTACH[engine](model)

    class Asks(Siblings):
        def __init__(self, _attachment, _call, engine):
            self.engine = engine

        def draft(self, rows, limits):
            return self.engine.draft(2, [[] for _ in rows])

        def observe(self, *_):
            pass

    model._tide.make_drafter = Asks
    with pytest.raises(UnsupportedOptionError, match="needs routers"):
        model.generate(**prompts(), **OPTIONS)


class Generous(ExactAcceptance):
    """Takes whatever is drafted, unless a processor has ruled it out."""

    is_exact = False

    def pick(self, scores, drafted):
        own = super().pick(scores, drafted)
        allowed = [[token for token in tokens if scores[i, token] > -torch.inf] for i, tokens in enumerate(drafted)]
        return [next(iter(tokens), token) for tokens, token in zip(allowed, own, strict=True)]


@pytest.mark.parametrize("engine", ATTACH)
@pytest.mark.parametrize("rows", [1, 3])
def test_another_rule_accepts_other_tokens_after_the_same_processors(rows, engine):
    model, batch = tiny_model("llama"), prompts(rows)
    ATTACH[engine](model)
    accepted = {}
    for rule in (ExactAcceptance, Generous):
        model._tide.make_rule = rule
        model._tide.make_drafter = lambda *_: Siblings([[VOCAB - 1] * 40] * rows)
        found = model.generate(**batch, **OPTIONS, suppress_tokens=[3])
        stats = model.last_exit_stats
        accepted[rule] = stats.accepted
        assert 3 not in found[:, batch["input_ids"].shape[1] :]
        assert ("not exact" in stats.summary()) == (rule is Generous)
    assert accepted[Generous] > accepted[ExactAcceptance]
