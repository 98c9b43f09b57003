"""Prompts that a model writes itself: what stands around them, where they end, and that batches can be redone."""

import pytest
import torch

from tide_hf.calibration.states import full_depth
from tide_hf.calibration.text import (
    LONGEST_OWN_PROMPT,
    UserTurn,
    find_user_turn,
    load_documents,
    plan_writing,
    write_documents,
    write_prompts,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_user_s_turn_is_what_the_template_puts_around_it(tiny_tokenizer):
    turn = find_user_turn(tiny_tokenizer)
    messages = [{"role": "user", "content": "hello"}]
    whole = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    hello = tiny_tokenizer("hello", add_special_tokens=False)["input_ids"]
    expected = tiny_tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert turn.before + hello + turn.after == expected


@pytest.mark.parametrize(
    "template",
    [
        None,
        "nothing of what is said",
        "{{ messages[-1]['content'] }}",
        "User: {{ messages[-1]['content'] }}",
    ],
)
def test_templates_without_a_user_s_turn(tiny_tokenizer, monkeypatch, template):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    assert find_user_turn(tiny_tokenizer) is None
    text = load_documents(None, tiny_tokenizer, samples=12, max_length=8, batch_size=4, seed=0)
    assert sum(len(batch.prompts) for batch in text.prompts) == 12
    assert sum(batch.num_own for batch in text.prompts) == 0
    assert "of its own" not in text.description


def test_a_quarter_of_the_prompts_are_the_model_s_own(tiny_tokenizer):
    text = load_documents(None, tiny_tokenizer, samples=32, max_length=8, batch_size=4, seed=0)
    assert sum(len(batch.prompts) for batch in text.prompts) == 24
    assert sum(batch.num_own for batch in text.prompts) == 8
    own = [batch for batch in text.prompts if batch.num_own]
    assert {batch.temperature is None for batch in own} == {True, False}
    assert len({batch.seed for batch in own}) == len(own)
    assert text.description.endswith("to prompts of its own")


def test_prompts_end_where_the_model_ends_them(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    turn = find_user_turn(tiny_tokenizer)
    torch.manual_seed(0)
    prompts = write_prompts(model, turn, 64, {7})
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


def test_a_batch_of_own_prompts_can_be_redone(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    turn = find_user_turn(tiny_tokenizer)
    (batch,) = plan_writing([], 8, 0, turn, 6)
    with full_depth(model):
        once, again = (write_documents(model, tiny_tokenizer, batch, 8) for _ in range(2))
    assert once == again
    assert len(once) > 1
    assert all(document.tokens[: len(turn.before)] == turn.before for document in once)
    assert all(document.tokens[: document.first + 1][-len(turn.after) :] == turn.after for document in once)


def test_what_the_model_is_told_for_other_calls_is_of_no_account(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    (batch,) = plan_writing([], 8, 0, find_user_turn(tiny_tokenizer), 6)
    expected = write_documents(model, tiny_tokenizer, batch, 8)
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.num_beams = 2
    assert write_documents(model, tiny_tokenizer, batch, 8) == expected


def test_a_model_that_writes_no_prompt_gives_no_document(tiny_llama, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("tide_hf.calibration.text.write_prompts", lambda *_: [])
    (batch,) = plan_writing([], 8, 0, UserTurn([5], [6]), 6)
    assert write_documents(tiny_llama(), tiny_tokenizer, batch, 8) == []
