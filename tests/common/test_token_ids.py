"""Prompts as token ids in padded batches, and answers truncated at an end-of-sequence token."""

import pytest

from tide_hf.common.errors import ChatTemplateError
from tide_hf.common.token_ids import encode_messages, encode_prompt, eos_token_ids, left_padded, truncate_at_eos


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ 1 + messages }}", "unsupported operand"),
        ({"tool_use": "x"}, "multiple chat templates"),
    ],
)
def test_a_template_that_refuses_a_chat_is_an_error(tiny_tokenizer, monkeypatch, template, reason):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    message = f"the tokenizer's chat template refuses the chat: got '.*{reason}"
    with pytest.raises(ChatTemplateError, match=message) as caught:
        encode_prompt(tiny_tokenizer, "hi")
    assert reason in caught.value.got


def test_a_prompt_is_encoded_as_the_tokenizer_encodes_it(tiny_tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    own = tiny_tokenizer.apply_chat_template(messages, **options)
    for encoded in (encode_prompt(tiny_tokenizer, "hi"), encode_messages(tiny_tokenizer, messages)):
        assert set(encoded) == {"input_ids", "attention_mask"}
        assert all(tensor.equal(own[name]) for name, tensor in encoded.items())


def test_prompts_are_left_padded_and_answers_truncated_at_their_first_eos_token():
    inputs = left_padded([[5, 6, 7], [8]], pad=9)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [9, 9, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert [eos_token_ids(value) for value in (None, 2, [2, 3], (3,))] == [set(), {2}, {2, 3}, {3}]
    assert truncate_at_eos([5, 2, 0, 2], {2, 3}) == [5, 2]
    assert truncate_at_eos([5, 2, 0, 2], {2, 3}, keep_eos=False) == [5]
    assert truncate_at_eos([5, 6], {2}) == truncate_at_eos([5, 6], {2}, keep_eos=False) == [5, 6]
