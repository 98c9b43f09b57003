"""Texts that a model goes on with: where they end, and that draws follow the model's own distribution."""

from contextlib import suppress

import pytest
import torch
from families import VOCAB, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from tide_hf.calibration.text import TOP_K, TopKSampling, continue_prompts, without_generation_defaults

TEXTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = logits.expand(20_000, -1).clone()
    drawn = TopKSampling(temperature)(None, rows).argmax(dim=-1)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(shares, (logits / temperature).softmax(dim=0), atol=0.015, rtol=0.0)


def test_only_the_best_are_drawn():
    torch.manual_seed(0)
    scores = torch.arange(2.0 * TOP_K).expand(2000, -1) / 1000
    drawn = TopKSampling(1.0)(None, scores.clone()).argmax(dim=-1)
    assert drawn.min() == TOP_K
    assert len(drawn.unique()) > TOP_K / 2


def test_texts_go_on_as_generate_would(tiny_llama):
    model = tiny_llama()
    expected = [
        model.generate(torch.tensor([text]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, len(text) :]
        for text in TEXTS
    ]
    rows = continue_prompts(model, TEXTS, 6, temperature=None, ends=set())
    assert rows == [row.tolist() for row in expected]
    end = rows[0][3]
    ended = continue_prompts(model, TEXTS, 6, temperature=None, ends={end})
    assert ended == [row[: row.index(end)] if end in row else row for row in rows]


@pytest.mark.parametrize(
    "said",
    [
        {"no_repeat_ngram_size": 1, "repetition_penalty": 3.0, "min_length": 30},
        {"suppress_tokens": list(range(200))},
        {"bad_words_ids": [[token] for token in range(200)]},
        {"max_time": 1e-9},
        {"return_dict_in_generate": True, "output_scores": True},
        {"stop_strings": ["x"]},
        {"prompt_lookup_num_tokens": 3},
        {"num_return_sequences": 2, "num_beams": 2},
    ],
    ids=lambda said: next(iter(said)),
)
def test_a_model_s_own_generation_config_has_no_say(tiny_llama, said):
    model = tiny_llama()
    expected = continue_prompts(model, TEXTS, 6, temperature=None, ends={257})
    model.generation_config.update(**said)
    assert continue_prompts(model, TEXTS, 6, temperature=None, ends={257}) == expected
    assert next(iter(said.items())) in model.generation_config.to_dict().items()


def test_a_pad_token_that_the_model_does_not_know(tiny_llama):
    model = tiny_llama()
    rows = continue_prompts(model, TEXTS, 6, temperature=None, ends=set())
    ends = {rows[0][0]}  # so that one row is filled up
    expected = continue_prompts(model, TEXTS, 6, temperature=None, ends=ends)
    assert continue_prompts(model, TEXTS, 6, temperature=None, ends=ends, pad=model.config.vocab_size) == expected


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_draws_are_those_of_the_seed(family):
    model = tiny_model(family)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(continue_prompts(model, TEXTS, 8, temperature=1.0, ends=set()))
    assert found[0] == found[1] != found[2]
    assert all(0 <= token < VOCAB for row in found[0] for token in row)


@pytest.mark.parametrize("place", ["model", "inside", "wrapper"])
def test_a_model_s_own_defaults_are_put_aside_and_come_back(place):
    base = tiny_model("llama")
    model = base if place == "model" else get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))
    own = GenerationConfig(eos_token_id=[3, 4], do_sample=True, tide_mode="post_hoc")
    (base if place == "inside" else model).generation_config = own
    with suppress(KeyboardInterrupt), without_generation_defaults(model):
        for one in (model, base) if place != "wrapper" else (model,):
            assert one.generation_config.to_diff_dict().keys() == {"eos_token_id", "transformers_version"}
            assert one.generation_config.eos_token_id == [3, 4]
        raise KeyboardInterrupt
    assert model.generation_config is own
