"""Text that a model writes: built-in prompts and its own, and answers that follow its own distribution."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from families import tiny_model
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from tide_hf.calibration.text import (
    LONGEST_OWN_PROMPT,
    TOP_K,
    TopKSampling,
    UserTurn,
    continue_prompts,
    draw_prompts,
    find_user_turn,
    load_documents,
    plan_writing,
    without_generation_defaults,
    write_documents,
    write_prompts,
)

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_follow_the_distribution(temperature):
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = logits.expand(20_000, -1).clone()
    drawn = TopKSampling(temperature)(None, rows).argmax(dim=-1)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(shares, (logits / temperature).softmax(dim=0), atol=0.015, rtol=0.0)


def test_only_the_top_k_are_sampled():
    torch.manual_seed(0)
    scores = torch.arange(2.0 * TOP_K).expand(2000, -1) / 1000
    drawn = TopKSampling(1.0)(None, scores.clone()).argmax(dim=-1)
    assert drawn.min() == TOP_K
    assert len(drawn.unique()) > TOP_K / 2


def test_continuations_are_those_of_generate(tiny_llama):
    model = tiny_llama()
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    rows = continue_prompts(model, PROMPTS, 6, temperature=None, ends=set())
    assert rows == [row.tolist() for row in expected]
    ends = {rows[0][3]}
    ended = continue_prompts(model, PROMPTS, 6, temperature=None, ends=ends)
    assert ended == [row[: row.index(*ends)] if ends & set(row) else row for row in rows]
    # a padding token that the tokenizer has and the model has not
    assert continue_prompts(model, PROMPTS, 6, temperature=None, ends=ends, pad=model.config.vocab_size) == ended


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 1, "repetition_penalty": 3.0, "min_length": 30, "suppress_tokens": list(range(200))},
        {"max_time": 1e-9},
        {"return_dict_in_generate": True, "output_scores": True},
        {"stop_strings": ["x"]},
        {"prompt_lookup_num_tokens": 3},
        {"num_return_sequences": 2, "num_beams": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_model_s_own_generation_config_is_ignored(tiny_llama, options):
    model = tiny_llama()
    expected = continue_prompts(model, PROMPTS, 6, temperature=None, ends={257})
    model.generation_config.update(**options)
    assert continue_prompts(model, PROMPTS, 6, temperature=None, ends={257}) == expected
    assert options.items() <= model.generation_config.to_dict().items()


@pytest.mark.parametrize("holder", ["model", "inside", "wrapper"])
def test_the_model_s_own_generation_config_is_restored(holder):
    base = tiny_model("llama")
    model = base if holder == "model" else get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))
    own = GenerationConfig(eos_token_id=[3, 4], do_sample=True, tide_mode="post_hoc")
    (base if holder == "inside" else model).generation_config = own
    with suppress(KeyboardInterrupt), without_generation_defaults(model):
        for one in (model, base) if holder != "wrapper" else (model,):
            assert one.generation_config.to_diff_dict().keys() == {"eos_token_id", "transformers_version"}
            assert one.generation_config.eos_token_id == [3, 4]
        raise KeyboardInterrupt
    assert model.generation_config is own


def test_built_in_prompts_are_distinct():
    prompts = draw_prompts(1500, seed=0)
    assert len(set(prompts)) == 1500
    assert prompts == draw_prompts(1500, seed=0)
    assert not any("{" in prompt for prompt in prompts)


# Prompts that the model writes itself


def test_a_user_turn_is_what_the_template_puts_around_a_message(tiny_tokenizer):
    turn = find_user_turn(tiny_tokenizer)
    messages = [{"role": "user", "content": "hello"}]
    whole = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    hello, expected = (tiny_tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("hello", whole))
    assert turn.before + hello + turn.after == expected


@pytest.mark.parametrize("template", [None, "no message", "User: {{ messages[-1]['content'] }}"])
def test_templates_without_a_user_turn(tiny_tokenizer, monkeypatch, template):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    assert find_user_turn(tiny_tokenizer) is None
    text = load_documents(None, tiny_tokenizer, SimpleNamespace(samples=12, batch_size=4, seed=0))
    assert sum(len(batch.prompts) for batch in text.prompts) == 12
    assert sum(batch.num_own for batch in text.prompts) == 0
    assert "of its own" not in text.description


def test_a_quarter_of_the_prompts_are_the_model_s_own(tiny_tokenizer):
    text = load_documents(None, tiny_tokenizer, SimpleNamespace(samples=32, batch_size=4, seed=0))
    assert sum(len(batch.prompts) for batch in text.prompts) == 24
    own = [batch for batch in text.prompts if batch.num_own]
    assert sum(batch.num_own for batch in own) == 8
    assert {batch.temperature is None for batch in own} == {True, False}
    assert len({batch.seed for batch in own}) == len(own)
    assert text.description.endswith("to prompts of its own")


def test_own_prompts_end_at_an_end_token_or_a_new_turn(tiny_llama, tiny_tokenizer):
    turn = find_user_turn(tiny_tokenizer)
    torch.manual_seed(0)
    prompts = write_prompts(tiny_llama(), turn, 64, {7})
    assert 0 < len(prompts) <= 64
    lengths = set()
    for prompt in prompts:
        assert prompt[: len(turn.before)] == turn.before
        assert prompt[-len(turn.after) :] == turn.after
        written = prompt[len(turn.before) : -len(turn.after)]
        assert written
        assert not {turn.after[0], 7} & set(written)
        lengths.add(len(written))
    assert max(lengths) <= LONGEST_OWN_PROMPT
    assert len(lengths) > 1


def test_a_batch_of_own_prompts_is_repeatable(tiny_llama, tiny_tokenizer):
    model, turn = tiny_llama(), find_user_turn(tiny_tokenizer)
    (batch,) = plan_writing([], 8, 0, turn, 6)
    once = write_documents(model, tiny_tokenizer, batch, 8)
    torch.manual_seed(1)
    assert once == write_documents(model, tiny_tokenizer, batch, 8)
    assert len(once) > 1
    for document in once:
        assert document.tokens[: len(turn.before)] == turn.before
        assert document.tokens[: document.first + 1][-len(turn.after) :] == turn.after


def test_a_model_that_writes_no_prompt_gives_no_document(tiny_llama, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("tide_hf.calibration.text.write_prompts", lambda *_: [])
    (batch,) = plan_writing([], 8, 0, UserTurn([5], [6]), 6)
    assert write_documents(tiny_llama(), tiny_tokenizer, batch, 8) == []
