"""Batches of prompts, and the defaults of a model that are put aside while it answers them."""

from contextlib import suppress

import pytest
from families import tiny_model
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from tide_hf.answers import batches_of_like_length, plain_generation


def test_batches_hold_prompts_of_like_length():
    assert list(batches_of_like_length([[1, 2, 3], [4], [5, 6], [7]], 2)) == [[1, 3], [2, 0]]


@pytest.mark.parametrize("place", ["model", "inside", "wrapper"])
def test_a_model_s_own_defaults_are_put_aside_and_come_back(place):
    base = tiny_model("llama")
    model = base if place == "model" else get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))
    own = GenerationConfig(eos_token_id=[3, 4], do_sample=True, tide_mode="post_hoc")
    (base if place == "inside" else model).generation_config = own
    with suppress(KeyboardInterrupt), plain_generation(model):
        for one in (model, base) if place != "wrapper" else (model,):
            assert one.generation_config.to_diff_dict().keys() == {"eos_token_id", "transformers_version"}
            assert one.generation_config.eos_token_id == [3, 4]
        raise KeyboardInterrupt
    assert model.generation_config is own
