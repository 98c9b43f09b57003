"""Rotary embeddings that change with the length: no draft crosses the change.

The length counts positions, whatever columns `input_ids` has.
"""

import pytest
import torch
from drafters import use_drafter
from families import longrope, tiny_model
from on_steps import ATTACH, prompts
from transformers import DynamicCache

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedOptionError

LIMIT, PROMPT = 20, 12
OPTIONS = {"max_new_tokens": 28, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SHORT = {**OPTIONS, "max_new_tokens": 8}
ROPES = {"dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "longrope": longrope(LIMIT)}


def model_and_ids(kind="longrope", rows=1, length=PROMPT):
    model = tiny_model("llama", rope_parameters=ROPES[kind], max_position_embeddings=LIMIT)
    return model, prompts(rows, length=length, seed=3)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "length", "new", "message"),
    [
        *((kind, 12, 28, r"of 12 tokens and max_length=40\. Expected at most 20.*ens=8 or") for kind in ROPES),
        *((kind, 20, 1, r"of 20 tokens and max_length=21.* Detach TIDE for this call") for kind in ROPES),
        # Longrope changes once, dynamic scaling with every token.
        ("dynamic", 30, 28, r"of 30 tokens and .* Expected at most 20 tokens in all\. Detach"),
    ],
)
def test_drafts_across_a_change_are_refused(kind, length, new, message):
    model, ids = model_and_ids(kind, length=length)
    TIDEModelForCausalLM.attach(model, strict=True)
    with pytest.raises(UnsupportedOptionError, match=message):
        model.generate(ids, **{**OPTIONS, "max_new_tokens": new})


@pytest.mark.parametrize(("kind", "length"), [("dynamic", PROMPT), ("longrope", PROMPT), ("longrope", 30)])
def test_drafts_before_any_change_or_after_the_only_one_are_verified(kind, length):
    model, ids = model_and_ids(kind, length=length)
    expected = model.generate(ids, **SHORT)
    use_drafter(TIDEModelForCausalLM.attach(model), "mixed", expected[:, length:].tolist(), width=8)
    assert torch.equal(model.generate(ids, **SHORT), expected)
    assert model.last_exit_stats.drafted > 0


@pytest.mark.parametrize("engine", ATTACH)
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_padding_in_a_pass_does_not_change_the_embedding(kind, rows, engine):
    """Rows with shorter drafts are padded, steps to a fixed width, and rows that have ended may stay in the batch."""
    model, ids = model_and_ids(kind, rows)
    expected = model.generate(ids, **SHORT)
    ATTACH[engine](model)
    for width in (3, 8):
        use_drafter(model, "mixed", expected[:, PROMPT:].tolist(), width)
        assert torch.equal(model.generate(ids, **SHORT), expected)
    assert model.last_exit_stats.drafted > 0


def embedded(model, ids):
    return {"inputs_embeds": model.get_input_embeddings()(ids)}


def after_a_cache(model, ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], **{CACHE: cache})
    return {"input_ids": ids[:, -1:], "attention_mask": torch.ones_like(ids), CACHE: cache}


def padded(_model, ids):
    mask = torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], dim=1)
    return {"input_ids": torch.cat([torch.zeros_like(ids), ids], dim=1), "attention_mask": mask}


@pytest.mark.parametrize("hand_in", [embedded, after_a_cache, padded])
def test_the_length_counts_positions_however_the_prompt_is_passed(hand_in):
    model, ids = model_and_ids()
    expected = model.generate(**hand_in(model, ids), **SHORT)
    TIDEModelForCausalLM.attach(model, strict=True)
    assert torch.equal(model.generate(**hand_in(model, ids), **SHORT), expected)
    with pytest.raises(UnsupportedOptionError, match=rf"of {PROMPT} tokens and max_length=26.*at most {LIMIT}"):
        model.generate(**hand_in(model, ids), **{**OPTIONS, "max_new_tokens": 14})


def test_a_long_row_that_ends_still_sets_the_rotary_embedding_of_the_others():
    """Plain decoding keeps it in the batch, where its positions decide how those of the others are turned."""
    model, ids = model_and_ids(rows=2, length=26)
    mask = torch.ones_like(ids)
    ids[1, :18] = mask[1, :18] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    options = {**OPTIONS, "max_new_tokens": 24}
    answers = model.generate(**inputs, **options)[:, 26:].tolist()
    options["eos_token_id"] = next(token for token in answers[0][:4] if token not in answers[1])
    expected = model.generate(**inputs, **options)
    TIDEModelForCausalLM.attach(model)
    assert torch.equal(model.generate(**inputs, **options), expected)
