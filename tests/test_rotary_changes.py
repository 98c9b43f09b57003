"""Rotary embeddings that change with the length: no draft is made across the change."""

import pytest
import torch
from drafters import use_drafter
from families import tiny_model
from test_lossless import OPTIONS, prompt

from tide_hf import TIDEModelForCausalLM
from tide_hf.errors import UnsupportedOptionError

ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 20,
    },
}


def rope_model(kind):
    return TIDEModelForCausalLM.attach(tiny_model("llama", rope_parameters=ROPES[kind], max_position_embeddings=20))


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
