"""Chats to calibrate on: their last answer is what is looked at, where the template tells it."""

import copy

import pytest
from documents import CHATS, TEXTS, read, rows_of, telling, texts_of, write_json_lines, write_parquet

from tide_hf.common.errors import CalibrationError

STRICT_TEMPLATE = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return telling(tiny_tokenizer)


@pytest.mark.parametrize("write", [write_json_lines, write_parquet])
def test_of_a_chat_the_last_answer_is_looked_at(write, tokenizer, tmp_path):
    write(tmp_path / "chats", rows_of(CHATS, "messages"))
    (tmp_path / "chats").rename(path := tmp_path / f"chats.{'jsonl' if write is write_json_lines else 'parquet'}")
    documents, num_skipped = read(path, tokenizer)
    assert (len(documents), num_skipped) == (6, 0)
    for document in documents:
        prompt, answer = document.tokens[: document.first + 1], document.tokens[document.first + 1 :]
        number = tokenizer.decode(answer)[-2]
        assert tokenizer.decode(answer) == f"It is {number}."  # without the end of the turn
        assert tokenizer.decode(prompt) == f"<system>Be brief.<eos><user>What is {number}?<eos><assistant>"


def test_of_a_chat_the_answer_alone_is_cut(tokenizer):
    (document,) = read([CHATS[3]], tokenizer, max_length=8)[0]
    assert document.num_positions == 9  # that of the first token of the answer stands in the prompt
    assert tokenizer.decode(document.tokens).endswith("<assistant>It is 3.")
    (document,) = read([CHATS[3]], tokenizer, max_length=7)[0]
    assert tokenizer.decode(document.tokens).endswith("<assistant>It is 3")


def test_what_follows_the_last_answer_is_not_read(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.eos_token = None  # or the answer is cut there
    (document,) = read([[*CHATS[3], {"role": "user", "content": "Thanks!"}]], own)[0]
    assert own.decode(document.tokens).endswith("<assistant>It is 3.<eos>")


def test_where_the_template_does_not_tell_the_whole_chat_is_looked_at(tokenizer, tiny_tokenizer):
    (document,) = read([CHATS[3]], tiny_tokenizer, max_length=30)[0]  # its template ends in <answer> at all times
    assert (document.first, len(document.tokens)) == (1, 30)
    assert tiny_tokenizer.decode(document.tokens).startswith("<user>Be brief.<user>What")
    for chat in (CHATS[3][:2], CHATS[3][2:]):  # no answer; no prompt
        (document,) = read([chat], tokenizer)[0]
        assert document.first == 1
        assert tokenizer.decode(document.tokens) == f"<{chat[0]['role']}>" + "".join(
            f"{'' if message is chat[0] else '<user>'}{message['content']}<eos>" for message in chat
        )


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "user", "content": None}], r"a message cannot be read \(chats given by the caller\): got \{'role'"),
        (["hello", "there"], r"a message cannot be read .*: got hello\. Expected a mapping"),
        (
            [*CHATS[0][:2], {"role": "assistant", "content": ""}],
            r"cannot be used .*a prompt of 46 tokens.* answer of 0",
        ),
        (
            [{"role": "user", "content": "why? " * 90}, CHATS[0][2]],
            r"a prompt of 4\d\d tokens.*Expected a.* at most 400",
        ),
        ([], r"a chat is empty .*: got no messages"),
    ],
)
def test_chats_that_cannot_be_used(chat, message, tokenizer):
    with pytest.raises(CalibrationError, match=f"got 1 rows, of which none can be used.*{message}"):
        read([chat], tokenizer)
    for source in ([chat, *CHATS], iter([chat, *CHATS])):
        documents, num_skipped = read(source, tokenizer)
        assert (len(documents), num_skipped) == (6, 1)


def test_a_template_that_refuses_and_a_tokenizer_without_one(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = STRICT_TEMPLATE
    with pytest.raises(CalibrationError, match=r"the chat template refuses a chat .*: got no system role"):
        read(CHATS, own)
    own.chat_template = None
    with pytest.raises(CalibrationError, match=r"a chat needs a chat template .*: got a tokenizer without one"):
        read(iter(CHATS), own)
    both = [{"text": text, "messages": chat} for text, chat in zip(TEXTS, CHATS, strict=True)]
    assert sorted(texts_of(both, own)) == TEXTS
    assert all("<user>" in text for text in texts_of(both, tokenizer))


def test_a_column_without_a_value_is_passed_over(tokenizer):
    rows = [{"text": TEXTS[0], "messages": None}, {"text": None, "messages": CHATS[0]}]
    assert sorted(texts_of(rows, tokenizer)) == sorted([TEXTS[0], *texts_of(CHATS[:1], tokenizer)])
    with pytest.raises(CalibrationError, match=r"a row is empty .*: got None"):
        read([{"text": None, "messages": None}], tokenizer)
