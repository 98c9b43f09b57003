"""A prompt that begins as the last text did reuses that part of its K/V."""

import pytest
import torch
from families import tiny_model

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.speculation.prefix_cache import PrefixCache

FIRST, SECOND = list(range(10, 30)), [*range(10, 20), *range(50, 60)]
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model():
    return TIDEModelForCausalLM.attach(tiny_model("llama"))


def answer(model, prefix, prompt):
    """The tokens, after a check that they are the base model's; and those that were known."""
    ids, cache = torch.tensor([prompt]), prefix.take(prompt)
    known = cache.get_seq_length()
    tokens = model.generate(ids, **{CACHE: cache}, **OPTIONS)
    assert torch.equal(tokens, model.generate(ids, **OPTIONS))
    prefix.keep(cache, tokens[0].tolist())
    return tokens[0].tolist(), known


def test_the_next_turn_goes_on_behind_the_last(model):
    prefix = PrefixCache(model.config)
    text, known = answer(model, prefix, FIRST)
    assert known == 0
    for _ in range(3):
        before = len(text)
        text, known = answer(model, prefix, [*text, 5, 6, 7])
        assert known == before - 1  # of the last token of an answer nothing is stored


def test_something_has_to_be_fed(model):
    prefix = PrefixCache(model.config)
    text, _ = answer(model, prefix, FIRST)
    assert answer(model, prefix, text[:-1])[1] == len(text) - 2


def test_a_window_cannot_be_cut_back():
    model = TIDEModelForCausalLM.attach(tiny_model("mistral"))
    prefix = PrefixCache(model.config)
    text, _ = answer(model, prefix, FIRST)
    assert answer(model, prefix, [*text, 5])[1] == len(text) - 1
    assert answer(model, prefix, [*FIRST, 90])[1] == 0


def test_k_v_that_change_with_the_length_are_read_again():
    rope = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"original_max_position_embeddings": 30, "rope_theta": 10000.0}
    model = TIDEModelForCausalLM.attach(tiny_model("llama", rope_parameters=rope))
    prefix = PrefixCache(model.config)
    text, _ = answer(model, prefix, FIRST[:10])
    text, known = answer(model, prefix, [*text, 5])
    assert known == 15
    assert answer(model, prefix, [*text, *FIRST])[1] == 0  # 43 tokens


def test_a_text_that_is_worded_anew_at_its_end_reuses_its_beginning(model):
    prefix = PrefixCache(model.config)
    answer(model, prefix, FIRST)
    assert answer(model, prefix, [*FIRST[:18], 90, 91])[1] == 18
    assert answer(model, prefix, [3, *FIRST])[1] == 0


def test_nothing_is_reused_of_a_call_that_fails(model):
    prefix = PrefixCache(model.config)
    text, _ = answer(model, prefix, FIRST)
    prefix.take([*text, 5])  # whose call fails
    assert answer(model, prefix, [*text, 5])[1] == 0
    prefix.keep(PrefixCache(model.config).take(FIRST), FIRST)  # which was never used
    assert answer(model, prefix, [*text, 5, 6])[1] == 0
