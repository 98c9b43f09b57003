"""`self_speculative` generates the base model's own tokens, in float32: by engine, family, drafter, batch and decoding.

On each engine every family runs, and every pair of a drafter, a batch and a way of decoding (with one family).
Compiled steps of families whose layers resemble those of others are in the slow run: tracing prefill takes seconds.
"""

import copy
from functools import cache
from typing import NamedTuple

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_drafter, use_heads
from families import ATTENTION, SDPA, slow_but, tiny_model
from on_steps import ATTACH, FEW, NEW, OPTIONS, WINDOWED, linear_heads, new_tokens, prompts
from transformers import LogitsProcessor

DRAFTERS = ("none", "right", "wrong", "random", "mixed", "trees", "exit heads", "draft head")
DECODING = {"greedy": {}, "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20}}
WIDTH = 3  # tokens per draft
TREE_WIDTH = 12  # nodes per tree
CHAINS = ("bloom",)  # families that take no trees, since ALiBi counts slots
TRACED_BY_DEFAULT = (*(family for family in FEW if family != "falcon"), "llama4_text", "qwen2_5_vl")


HEAD_AMONG_TREES = "draft head among trees"


class Case(NamedTuple):
    engine: str
    family: str
    drafter: str = "exit heads"
    rows: int = 1  # the last of several has padding
    decoding: str = "greedy"
    attention: str = "sdpa"

    @property
    def has_heads(self):
        return self.drafter in ("exit heads", "draft head", HEAD_AMONG_TREES)

    @property
    def is_slow(self):
        """Whether tracing it takes long, and other cases trace layers that are much alike."""
        likes = self.family in ("llama", "bloom") or (self.rows == 1 and self.family in TRACED_BY_DEFAULT)
        return self.engine == "compiled" and not likes


def cases(engine):
    """The cases of an engine, as fields after the engine."""
    for position, drafter in enumerate(DRAFTERS):
        first, second = DECODING if position % 2 else reversed(DECODING)
        yield from (("llama", drafter, 1, first), ("llama", drafter, 3, second))
    yield from ((family, "exit heads", 1) for family in ATTENTION)
    yield from ((family, "mixed", 3) for family in (ATTENTION if engine == "eager" else (*FEW, *WINDOWED)))
    trees = ATTENTION if engine == "eager" else (*FEW, *WINDOWED)
    yield from ((family, "trees", rows) for family in trees for rows in (1, 3))
    yield from ((family, "trees", 3, "greedy", "eager") for family in SDPA if engine == "eager")
    yield from ((family, "draft head", 1) for family in (*FEW, "mistral") if family != "opt")
    if engine != "captured":  # whose single rows verify chains
        yield from (("llama", HEAD_AMONG_TREES, rows) for rows in (1, 3))
    yield from (("bloom", drafter, 3) for drafter in ("exit heads", "draft head"))


CASES = [
    pytest.param(case, marks=pytest.mark.slow if case.is_slow else ())
    for case in dict.fromkeys(Case(engine, *fields) for engine in ATTACH for fields in cases(engine))
]


class Unchanged(LogitsProcessor):
    """A processor of the caller's: the rows of a batch are then sampled in plain decoding's order, as a seed wants."""

    def __call__(self, input_ids, scores):
        return scores


def generate(model, rows, decoding):
    torch.manual_seed(7)
    processors = [Unchanged()] if decoding == "sampling" else None
    batch = prompts(rows, pads=2 if rows > 1 else 0)
    return model.generate(**batch, **{**OPTIONS, **DECODING[decoding]}, logits_processor=processors)


@cache
def base_model(family, attention):
    return tiny_model(family, attention=attention if family in SDPA else "eager")


@cache
def expected_tokens(family, attention, rows, decoding):
    return generate(base_model(family, attention), rows, decoding)


@cache
def attached(engine, family, attention, has_draft_head):
    """A copy of the base model with routers, and its steps; cases share them."""
    model = copy.deepcopy(base_model(family, attention))
    routers = draft_head_for(model) if has_draft_head else linear_heads(model)
    return model, ATTACH[engine](model, routers)


@cache
def check(case):
    """Compare with plain decoding; return the drafter, if heads draft."""
    expected = expected_tokens(case.family, case.attention, case.rows, case.decoding)
    model, steps = attached(case.engine, case.family, case.attention, case.drafter.startswith("draft head"))
    replays_before = steps.replays if steps is not None else 0
    made = [None]
    if case.has_heads:
        exit_layer = 0 if case.drafter.startswith("draft head") else model._tide.routers.exit_layers[-1]
        kind = "trees" if case.drafter == HEAD_AMONG_TREES else "right"
        made = use_heads(model, exit_layer, WIDTH, continuations=new_tokens(expected), kind=kind)
    elif case.drafter == "none":
        use_drafter(model, "right", new_tokens(expected), width=0)
    else:
        use_drafter(model, case.drafter, new_tokens(expected), TREE_WIDTH if case.drafter == "trees" else WIDTH)
    if case.drafter == "trees":  # by a probe, which has to find them right as well
        assert model._tide.takes_trees == (case.family not in CHAINS)
    assert torch.equal(generate(model, case.rows, case.decoding), expected)
    check_acceptance(model.last_exit_stats, case)
    check_engine(model.last_exit_stats, case, steps, replays_before)
    (heads,) = made
    return heads


def check_acceptance(stats, case):
    assert stats.total_tokens == case.rows * NEW
    if case.drafter == "none":
        assert (stats.drafted, stats.rounds) == (0, case.rows * (NEW - 1))
        return
    assert stats.drafted > 0
    if case.drafter == "right":
        assert stats.accepted == stats.drafted
        assert stats.rounds == case.rows * -(-(NEW - 1) // (WIDTH + 1))
    elif case.drafter == "wrong":
        assert (stats.accepted, stats.rounds) == (0, case.rows * (NEW - 1))
    elif case.drafter in ("mixed", "trees"):
        assert 0 < stats.accepted < stats.drafted


def check_engine(stats, case, steps, replays_before):
    assert stats.fallback_reason is None
    if case.engine == "eager":
        assert stats.engine == "eager"
    else:
        assert stats.engine == "compiled"
        assert steps.replays > replays_before
        assert steps.refused is None
        if case.engine == "compiled":
            assert not steps.prompts.refused
        else:  # replays did not run the step's Python code
            advancing = sum(buffers.advancing is not None for buffers in steps._buffers.values())
            assert steps.make_replay.function_calls == steps.warm_up.num_prepared + advancing


def check_heads(case):
    """Heads draft on steps what they draft eagerly, with the same scores."""
    heads, eager = check(case), check(case._replace(engine="eager"))
    assert eager.drafted
    first = case.rows if case.engine == "captured" and case.rows > 1 else None  # later, shorter rows draft less
    assert heads.drafted[:first] == eager.drafted[:first]
    if case.engine == "compiled":
        torch.testing.assert_close(torch.tensor(heads.scores), torch.tensor(eager.scores), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:-1])).replace(" ", "_"))
def test_tokens_are_the_base_models(case):
    check(case)
    if case.has_heads:
        check_heads(case)


@pytest.mark.parametrize("engine", ATTACH)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_mixture_of_experts_may_return_its_routers_logits(rows, engine):
    """Training leaves that in a model's config; a batch has masks that plain decoding lacks."""
    plain, model, options = tiny_model("mixtral"), tiny_model("mixtral"), dict(OPTIONS)
    if engine == "eager":
        options["output_router_logits"] = True
    else:
        plain.config.output_router_logits = model.config.output_router_logits = True
    expected = plain.generate(prompts(rows)["input_ids"], **options)
    ATTACH[engine](model)
    use_drafter(model, "mixed", new_tokens(expected))
    assert torch.equal(model.generate(prompts(rows)["input_ids"], **options), expected)
    assert model.last_exit_stats.accepted > 0


@pytest.mark.parametrize("engine", ["compiled", "captured"])
@pytest.mark.parametrize("family", slow_but(("llama",), SDPA))
def test_tokens_by_eager_attention_are_the_base_models(family, engine):
    check_heads(Case(engine, family, attention="eager"))
