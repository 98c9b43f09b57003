"""What goes over the wire: requests checked field by field, and tokens turned into text piece by piece."""

import json

import pytest

from tide_hf.errors import RequestError
from tide_hf.serving.protocol import ChatRequest, Sampling, server_sent_event
from tide_hf.serving.requests import parse_chat_request
from tide_hf.serving.text import TextPieces

HELLO = [{"role": "user", "content": "hello"}]


def parse(**fields):
    return parse_chat_request(json.dumps({"model": "tiny", "messages": HELLO, **fields}).encode(), "tiny")


def test_a_request_in_full():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "ü"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "x"}]
    parsed = parse(
        messages=messages,
        temperature=0.5,
        top_p=1,
        seed=7,
        max_tokens=5,
        max_completion_tokens=6,
        stop="\n",
        stream=True,
        stream_options={"include_usage": True},
        user="someone",
        n=1,
        tools=[],
        presence_penalty=0.0,
        logprobs=None,
    )
    assert parsed == ChatRequest(
        messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "aü"}),
        sampling=Sampling(0.5, 1.0, 7),
        max_tokens=6,
        stop=("\n",),
        stream=True,
        include_usage=True,
    )
    assert parse() == ChatRequest(messages=(HELLO[0],))


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": "gpt-4"}, "model", "model_not_found"),
        ({"model": None}, "model", "model_not_found"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hello"}, "messages", "invalid_value"),
        ({"messages": ["hello"]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_unicode"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"top_p": "1"}, "top_p", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"stop": ["a", ""]}, "stop", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": "\udfff"}, "stop", "invalid_unicode"),
        ({"stream": 1}, "stream", "invalid_value"),
        ({"stream_options": []}, "stream_options", "invalid_value"),
        ({"stream_options": {"include_usage": "yes"}}, "include_usage", "invalid_value"),
        ({"n": 2}, "n", "unsupported_value"),
        ({"n": True}, "n", "unsupported_value"),
        ({"logprobs": True}, "logprobs", "unsupported_value"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_value"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
        ({"do_sample": True}, "do_sample", "unknown_parameter"),
        ({"\ud800": 1}, "\\ud800", "unknown_parameter"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, param, code):
    with pytest.raises(RequestError, match=r": got .+\. Expected .+\.") as caught:
        parse(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.status == (404 if code == "model_not_found" else 400)
    assert len(str(caught.value).encode()) < 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'{"model": "\xc3\x28"}',
        b"{",
        b"[]",
        b'"text"',
        b'{"temperature": NaN}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_no_json_object_in_utf8_is_refused(body):
    with pytest.raises(RequestError, match=r"JSON") as caught:
        parse_chat_request(body, "tiny")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_wrong_value_is_shown_but_not_in_full():
    deep = json.loads("[" * 200 + "]" * 200)
    for value in (deep, ["x" * 9999] * 99, {"y" * 9999: deep}, "z" * 9999):
        with pytest.raises(RequestError) as caught:
            parse(stream=value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["plain", "né 🦊!", "  two  spaces\n", "日本語のテキスト", ""])
@pytest.mark.parametrize("stop", [(), ("never",), ("🦊?", "xx")])
def test_pieces_are_the_text(tiny_tokenizer, text, stop):
    pieces = TextPieces(tiny_tokenizer, stop)
    parts = [pieces.add(token) for token in tiny_tokenizer(text)["input_ids"]]
    assert "".join(parts) + pieces.finish() == text
    assert not pieces.stopped
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_half_a_character_comes_out_at_the_end(tiny_tokenizer):
    pieces = TextPieces(tiny_tokenizer, ())
    tokens = tiny_tokenizer("a🦊")["input_ids"]
    assert [pieces.add(token) for token in tokens[:-1]] == ["a", "", "", ""]
    assert pieces.finish() == "\N{REPLACEMENT CHARACTER}"
    endless = [pieces.add(tokens[-1]) for _ in range(20)]
    assert any(endless)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\ntwo", ("\n",), "one"),
        ("say END now", ("END", "now"), "say "),
        ("EEND", ("END",), "E"),
        ("abcabd!", ("abd",), "abc"),
        ("x", ("x",), ""),
    ],
)
def test_nothing_of_a_stop_string_comes_out(tiny_tokenizer, text, stop, expected):
    pieces = TextPieces(tiny_tokenizer, stop)
    shown = ""
    for token in tiny_tokenizer(text)["input_ids"]:
        shown += pieces.add(token)
        if pieces.stopped:
            break
    assert pieces.stopped
    assert shown + pieces.finish() == expected


def test_the_beginning_of_a_stop_string_comes_out_when_it_was_none(tiny_tokenizer):
    pieces = TextPieces(tiny_tokenizer, ("END",))
    tokens = tiny_tokenizer("the EN")["input_ids"]
    assert "".join(pieces.add(token) for token in tokens) == "the "
    assert pieces.finish() == "EN"


def test_a_message_may_say_that_it_lacks_things():
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}, message]}
    parsed = parse_chat_request(json.dumps(body).encode(), "tiny")
    assert parsed.messages[1] == {"role": "assistant", "content": "x"}


def test_an_event_is_one_line_to_every_client():
    data = {"content": "one\u2028two\u2029three\x85four"}
    (line, *rest) = server_sent_event(data).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == data
    assert rest == [""]
