"""Rotary embeddings that change with the length: no draft is made across the change.

The length is that of positions, whatever columns `input_ids` has.
"""

import pytest
import torch
from calls import OPTIONS, prompt
from drafters import use_drafter
from families import VOCAB, tiny_model
from transformers import DynamicCache

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedOptionError

LIMIT, PROMPT = 20, 12
PADDED = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": LIMIT,
    },
}


def rope_model(kind):
    model = tiny_model("llama", rope_parameters=ROPES[kind], max_position_embeddings=20)
    return TIDEModelForCausalLM.attach(model, strict=True)


@pytest.mark.parametrize("kind", ROPES)
def test_a_rotary_embedding_that_changes_with_length_is_not_drafted_across(kind):
    model = rope_model(kind)
    with pytest.raises(UnsupportedOptionError, match=r"of 12 tokens and max_length=40\. Expected at most 20.*ens=8 or"):
        model.generate(prompt(), **OPTIONS)
    with pytest.raises(UnsupportedOptionError, match=r"of 20 tokens and max_length=21.* Detach TIDE for this call"):
        model.generate(prompt(2)[:, :1].expand(1, 20), **{**OPTIONS, "max_new_tokens": 1})
    options = {**OPTIONS, "max_new_tokens": 8}
    expected = TIDEModelForCausalLM.detach(model).generate(prompt(), **options)
    assert torch.equal(TIDEModelForCausalLM.attach(model).generate(prompt(), **options), expected)


def test_behind_a_rotary_embeddings_only_change_drafts_are_as_ever():
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    model = rope_model("longrope")
    expected = TIDEModelForCausalLM.detach(model).generate(ids, **OPTIONS)
    use_drafter(TIDEModelForCausalLM.attach(model), "wrong", expected[:, 30:].tolist(), width=8)
    assert torch.equal(model.generate(ids, **OPTIONS), expected)


def test_behind_the_first_of_many_changes_nothing_is_drafted():
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    with pytest.raises(UnsupportedOptionError, match=r"of 30 tokens and .* Expected at most 20 tokens in all\. Detach"):
        rope_model("dynamic").generate(ids, **OPTIONS)


def model_and_ids(rows=1, length=PROMPT):
    model = tiny_model("llama", rope_parameters=ROPES["longrope"], max_position_embeddings=LIMIT)
    return model, torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def embedded(model, ids):
    return {"inputs_embeds": model.get_input_embeddings()(ids)}


def behind_a_cache(model, ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], **{CACHE: cache})
    return {"input_ids": ids[:, -1:], "attention_mask": torch.ones_like(ids), CACHE: cache}


def padded(_model, ids):
    mask = torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], dim=1)
    return {"input_ids": torch.cat([torch.zeros_like(ids), ids], dim=1), "attention_mask": mask}


@pytest.mark.parametrize("hand_in", [embedded, behind_a_cache, padded])
def test_an_answer_across_the_change_is_refused_however_the_prompt_comes(hand_in):
    model, ids = model_and_ids()
    inputs = hand_in(model, ids)
    TIDEModelForCausalLM.attach(model, strict=True)
    with pytest.raises(
        UnsupportedOptionError, match=rf"a prompt of {PROMPT} tokens and max_length=26.*at most {LIMIT}"
    ):
        model.generate(**inputs, max_new_tokens=14, **PADDED)


@pytest.mark.parametrize("hand_in", [embedded, behind_a_cache, padded])
def test_one_in_front_of_it_is_not(hand_in):
    model, ids = model_and_ids()
    expected = model.generate(**hand_in(model, ids), max_new_tokens=8, **PADDED)
    inputs = hand_in(model, ids)
    TIDEModelForCausalLM.attach(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, **PADDED), expected)


def test_a_long_row_that_ends_goes_on_counting_for_a_short_one():
    """Plain decoding keeps it in the batch, where its positions tell how those of the others are turned."""
    model, ids = model_and_ids(rows=2, length=26)
    mask = torch.ones_like(ids)
    ids[1, :18] = mask[1, :18] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 24}
    answers = model.generate(**inputs, **PADDED)[:, 26:].tolist()
    eos = next(token for token in answers[0][:4] if token not in answers[1])
    options = {**PADDED, "eos_token_id": eos}
    expected = model.generate(**inputs, **options)
    TIDEModelForCausalLM.attach(model)
    assert torch.equal(model.generate(**inputs, **options), expected)
