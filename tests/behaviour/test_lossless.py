"""`self_speculative` generates the base model's own tokens, in float32: by engine, family, drafter, batch and decoding.

On each engine every family runs, and every pair of a drafter, a batch and a way of decoding (on one family).
"""

import copy
from functools import cache

import pytest
import torch
from block_heads import WITH_BLOCK, block_layer_of, routers_for
from drafters import use_drafter, use_heads
from families import ATTENTION, SDPA, slow_but, tiny_model
from on_steps import (
    ATTACH,
    FEW,
    NEW,
    OPTIONS,
    UNTRACED,
    WINDOWED,
    linear_heads,
    new_tokens,
    prompts,
)
from transformers import LogitsProcessor

DRAFTERS = ("none", "right", "wrong", "random", "mixed", "exit heads", "draft block")
WIDTH = 3  # tokens per draft


class Unchanged(LogitsProcessor):
    """A processor of the caller's: the rows of a batch are then sampled in plain decoding's order, as a seed wants."""

    def __call__(self, input_ids, scores):
        return scores


DECODING = {"greedy": {}, "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20}}


def generate(model, rows, decoding):
    torch.manual_seed(7)
    options = {**OPTIONS, **DECODING[decoding], "logits_processor": [Unchanged()] if decoding == "sampling" else None}
    return model.generate(**prompts(rows, pads=2 if rows > 1 else 0), **options)


@cache
def base_model(family, attention):
    return tiny_model(family, attention=attention)


@cache
def expected_tokens(family, attention, rows, decoding):
    return generate(base_model(family, attention), rows, decoding)


@cache
def attached(engine, family, attention, with_block):
    """A copy of the base model with routers, and its steps, which its cases share."""
    model = copy.deepcopy(base_model(family, attention))
    routers = routers_for(model, block_layer_of(family)) if with_block else linear_heads(model)
    return model, ATTACH[engine](model, routers)


@cache
def eager_drafts(family, attention, drafter, rows, decoding):
    model, _ = attached("eager", family, attention, drafter == "draft block")
    (heads,) = use_heads_of(model, family, attention, drafter, rows, decoding)
    return heads


def use_heads_of(model, family, attention, drafter, rows, decoding):
    """Generate with drafts of heads; return their drafters."""
    expected = expected_tokens(family, attention, rows, decoding)
    exit_layer = block_layer_of(family) if drafter == "draft block" else 3
    made = use_heads(model, exit_layer, WIDTH, continuations=new_tokens(expected))
    assert torch.equal(generate(model, rows, decoding), expected)
    return made


def cases(engine):
    """(family, drafter, rows, decoding) of an engine."""
    for position, drafter in enumerate(DRAFTERS):
        ways = list(DECODING)[:: 1 if position % 2 else -1]
        yield from (("llama", drafter, rows, decoding) for rows, decoding in zip((1, 3), ways, strict=True))
    yield from ((family, "exit heads", 1, "greedy") for family in ATTENTION)
    yield from ((family, "mixed", 3, "greedy") for family in (ATTENTION if engine == "eager" else FEW))
    yield from ((family, "draft block", 1, "greedy") for family in FEW if family in WITH_BLOCK)
    yield from (("bloom", drafter, 3, "greedy") for drafter in ("exit heads", "draft block"))


def is_eager_by_design(engine, family, rows):
    """Several rows behind sliding windows have no steps of fixed shape."""
    return engine != "eager" and rows > 1 and family in WINDOWED


CASES = [
    (engine, *case)
    for engine in ATTACH
    for case in dict.fromkeys(cases(engine))
    if not is_eager_by_design(engine, case[0], case[2])
]


@pytest.mark.parametrize(
    ("engine", "family", "drafter", "rows", "decoding"), CASES, ids=lambda value: str(value).replace(" ", "_")
)
def test_tokens_are_the_base_models(engine, family, drafter, rows, decoding):
    attention = "sdpa" if family in SDPA else "eager"
    check(engine, family, attention, drafter, rows, decoding)


@pytest.mark.parametrize("engine", ["compiled", "captured"])
@pytest.mark.parametrize("family", slow_but(("llama",), SDPA))
def test_tokens_by_eager_attention_are_the_base_models(family, engine):
    check(engine, family, "eager", "exit heads", 1, "greedy")


def check(engine, family, attention, drafter, rows, decoding):
    expected = expected_tokens(family, attention, rows, decoding)
    model, steps = attached(engine, family, attention, drafter == "draft block")
    replays_before = steps.replays if steps is not None else 0
    if drafter in ("exit heads", "draft block"):
        check_heads(engine, rows, use_heads_of(model, family, attention, drafter, rows, decoding)[0],
            eager_drafts(family, attention, drafter, rows, decoding))  # fmt: skip
    else:
        width = 0 if drafter == "none" else WIDTH
        use_drafter(model, "right" if drafter == "none" else drafter, new_tokens(expected), width)
        assert torch.equal(generate(model, rows, decoding), expected)
    check_acceptance(model.last_exit_stats, drafter, rows)
    check_engine(model.last_exit_stats, engine, family, steps, replays_before)


def check_acceptance(stats, drafter, rows):
    assert stats.total_tokens == rows * NEW
    if drafter == "none":
        assert (stats.drafted, stats.rounds) == (0, rows * (NEW - 1))
        return
    assert stats.drafted > 0
    if drafter == "right":
        assert stats.accepted == stats.drafted
        assert stats.rounds == rows * -(-(NEW - 1) // (WIDTH + 1))
    elif drafter == "wrong":
        assert (stats.accepted, stats.rounds) == (0, rows * (NEW - 1))
    elif drafter == "mixed":
        assert 0 < stats.accepted < stats.drafted


def check_engine(stats, engine, family, steps, replays_before):
    assert stats.fallback_reason is None
    if engine == "eager":
        assert stats.engine == "eager"
        return
    if engine == "compiled" and family in UNTRACED:
        assert steps.refused is not None
        return
    assert stats.engine == "compiled"
    assert steps.replays > replays_before
    assert steps.refused is None
    if engine == "captured":  # later replays did not run the step's Python code
        assert steps.make_replay.function_calls == steps.warm_up.num_made


def check_heads(engine, rows, heads, eager):
    """Heads draft on steps what they draft eagerly, with the same scores."""
    assert eager.drafted
    first = rows if engine == "captured" and rows > 1 else None  # later rounds draft less where a row has less room
    assert heads.drafted[:first] == eager.drafted[:first]
    if engine == "compiled":
        torch.testing.assert_close(torch.tensor(heads.scores), torch.tensor(eager.scores), atol=1e-4, rtol=0.0)
