"""K/V that are kept: which of them a prompt goes on behind, and what becomes of the others."""

import pytest
import torch
from families import tiny_model

from tide_hf import TIDEModelForCausalLM
from tide_hf.decoding.kept_caches import KeptCaches
from tide_hf.structure import CACHE

FIRST, SECOND = list(range(10, 30)), [*range(10, 20), *range(50, 60)]
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model():
    return TIDEModelForCausalLM.attach(tiny_model("llama"))


def answer(model, caches, prompt):
    """The tokens, after a check that they are the base model's; and those that were known."""
    ids, cache = torch.tensor([prompt]), caches.take(prompt)
    known = cache.get_seq_length()
    tokens = model.generate(ids, **{CACHE: cache}, **OPTIONS)
    assert torch.equal(tokens, model.generate(ids, **OPTIONS))
    caches.keep(cache, tokens[0].tolist())
    return tokens[0].tolist(), known


def test_the_next_turn_goes_on_behind_the_last(model):
    caches = KeptCaches(model.config)
    text, known = answer(model, caches, FIRST)
    assert known == 0
    for _ in range(3):
        before = len(text)
        text, known = answer(model, caches, [*text, 5, 6, 7])
        assert known == before - 1  # of the last token of an answer nothing is stored


def test_the_one_that_shares_most_is_found_and_the_oldest_goes(model):
    caches = KeptCaches(model.config, most=2)
    first, _ = answer(model, caches, FIRST)
    second, _ = answer(model, caches, [3, *SECOND])
    assert answer(model, caches, [*first, 8])[1] == len(first) - 1
    assert answer(model, caches, [*second, 8])[1] == len(second) - 1
    answer(model, caches, [4, *FIRST])
    assert answer(model, caches, [*second, 8, 9])[1] == len(second) + 1
    assert answer(model, caches, [*first, 8, 9])[1] == 0


def test_a_text_that_begins_alike_takes_nothing_away(model):
    caches = KeptCaches(model.config, most=2)
    first, _ = answer(model, caches, FIRST)
    assert answer(model, caches, SECOND)[1] == 10  # less than half of the first, which stays
    assert answer(model, caches, [*first, 8])[1] == len(first) - 1


def test_a_text_that_is_worded_anew_at_its_end_takes_its_place(model):
    caches = KeptCaches(model.config, most=2)
    answer(model, caches, FIRST)
    assert answer(model, caches, [*FIRST[:18], 90, 91])[1] == 18
    assert len(caches._kept) == 1


def test_something_has_to_be_fed(model):
    caches = KeptCaches(model.config)
    text, _ = answer(model, caches, FIRST)
    assert answer(model, caches, text[:-1])[1] == len(text) - 2


def test_a_few_tokens_are_read_again(model):
    caches = KeptCaches(model.config, least_shared=11)
    answer(model, caches, FIRST)
    assert answer(model, caches, SECOND)[1] == 0
    answer(model, caches, FIRST)
    assert answer(model, caches, [*FIRST[:11], 90])[1] == 11


def test_a_window_cannot_be_cut_back():
    model = TIDEModelForCausalLM.attach(tiny_model("mistral"))
    caches = KeptCaches(model.config)
    text, _ = answer(model, caches, FIRST)
    assert answer(model, caches, [*text, 5])[1] == len(text) - 1
    assert answer(model, caches, [*FIRST, 90])[1] == 0


def test_k_v_that_change_with_the_length_are_read_again():
    rope = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"original_max_position_embeddings": 30, "rope_theta": 10000.0}
    model = TIDEModelForCausalLM.attach(tiny_model("llama", rope_parameters=rope))
    caches = KeptCaches(model.config)
    text, _ = answer(model, caches, FIRST[:10])
    text, known = answer(model, caches, [*text, 5])
    assert known == 15
    assert answer(model, caches, [*text, *FIRST])[1] == 0  # 43 tokens


def test_nothing_is_kept_of_calls_that_fail_or_where_nothing_is_to_be(model):
    caches = KeptCaches(model.config, most=0)
    text, _ = answer(model, caches, FIRST)
    assert answer(model, caches, [*text, 5])[1] == 0
    caches = KeptCaches(model.config)
    text, _ = answer(model, caches, FIRST)
    caches.take([*text, 5])  # whose call fails
    assert answer(model, caches, [*text, 5])[1] == 0
    caches.keep(KeptCaches(model.config).take(FIRST), FIRST)  # which was never used
    assert answer(model, caches, [*text, 5, 6])[1] > 0
