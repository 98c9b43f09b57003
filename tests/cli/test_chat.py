"""``tide-hf chat``: conversations that reuse their cache, over a pipe, in a terminal, and how they end."""

import io
import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from families import tiny_model

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.cli.chat import WARMING_UP, Conversation
from tide_hf.cli.main import main
from tide_hf.cli.model_arguments import NO_ROUTERS
from tide_hf.common.errors import ConfigurationError
from tide_hf.common.token_ids import encode_messages
from tide_hf.evaluation.benchmark import tide_method
from tide_hf.generation import TIDEGenerationMixin

NEW_TOKENS = 10
# A template that renders earlier turns differently in later ones.
REWRITING = "{% for m in messages %}<{{ m['role'][0] }}{{ loop.revindex }}>{{ m['content'] }}{% endfor %}<answer>"


@pytest.fixture
def talk(tiny_tokenizer):
    """A function that makes a conversation with an attached tiny model; `widths` has the tokens of every pass."""

    def make(family="llama", mode="self_speculative"):
        model = tiny_model(family, vocab_size=260, eos_token_id=257, pad_token_id=257)
        routers = TIDERouters.for_model(model, exit_layers=[1, 2]) if mode != "self_speculative" else None
        TIDEModelForCausalLM.attach(model, routers, mode=mode)
        make.widths, forward = [], model.forward
        model.forward = lambda **kwargs: make.widths.append(kwargs["input_ids"].shape[1]) or forward(**kwargs)
        return Conversation(tide_method(model, mode, 0.5), tiny_tokenizer, NEW_TOKENS)

    return make


def answer(conversation, question, widths):
    """Check that the answer is that of the whole conversation computed anew.

    Return how many tokens its first pass took, and the length of the prompt.
    """
    inputs = encode_messages(conversation.tokenizer, [*conversation.messages, {"role": "user", "content": question}])
    length = inputs["input_ids"].shape[1]
    options = conversation.method.options | {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    expected = conversation.method.model.generate(**inputs, **options)[0, length:]
    widths.clear()
    assert conversation.ask(question).new_tokens == expected.tolist()
    return widths[0], length


@pytest.mark.parametrize("mode", ["self_speculative", "early_exit"])
def test_a_turn_prefills_only_its_new_tokens_and_a_failed_one_changes_nothing(talk, mode):
    conversation, passes = talk(mode=mode), iter(range(9))

    def interrupt(value):
        if next(passes) > 2:
            raise KeyboardInterrupt

    turns = [answer(conversation, question, talk.widths) for question in ("hello", "and abc abc?")]
    before = list(conversation.messages)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("and?", SimpleNamespace(put=interrupt))
    with pytest.raises(ConfigurationError, match="too long for the model: got 2"):
        conversation.ask("a" * 2500)
    assert conversation.messages == before
    turns.append(answer(conversation, "who", talk.widths))  # does not use the cache of the interrupted call
    conversation.reset()
    turns.append(answer(conversation, "hello", talk.widths))
    assert [prefilled < length for prefilled, length in turns] == [False, True, False, False]
    assert turns[3] == turns[0]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


@pytest.mark.parametrize(("family", "mode"), [("mistral", "self_speculative"), ("mamba", "post_hoc")])
def test_a_template_may_render_earlier_turns_differently(talk, tiny_tokenizer, monkeypatch, family, mode):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", REWRITING)
    conversation = talk(family, mode)
    for question in ("hello", "and abc abc?", "who"):
        answer(conversation, question, talk.widths)


@pytest.fixture
def command(tiny_model_folder, monkeypatch):
    """The command line; the engine is not warmed up, to save time."""
    monkeypatch.setattr(TIDEGenerationMixin, "tide_warm_up", lambda model: None)
    return ["chat", str(tiny_model_folder), "--max-new-tokens", "8"]


@pytest.fixture
def typing(monkeypatch):
    """A function that types lines into this process's terminal; an exception among them is raised."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    return lambda *lines: monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError()]))


def test_over_a_pipe_each_line_is_a_message(command, pipe_in, capsys):
    """A message repeated after /reset is answered as the first time, and as `generate` answers it."""
    pipe_in(b"hello\n\n  and abc?\n/what\n/reset\nhello\n/quit\nnever read\n")
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert [record["prompt"] for record in records] == ["hello", "and abc?", "hello"]
    assert records[0]["tokens"] == records[2]["tokens"] != records[1]["tokens"]
    assert all(record["stats"]["mode"] == "self_speculative" for record in records)
    assert "There is no command /what. /reset starts a new conversation" in captured.err
    assert "This is a new conversation." in captured.err
    assert f"routers: {NO_ROUTERS}" in captured.err
    assert main(["generate", *command[1:], "--json", "hello"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == records[0]["tokens"]
    pipe_in(b"hello\nand abc?\n")
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(record["text"] + "\n" for record in records[:2])
    assert captured.err.count("full pass:") == 2


def test_over_a_pipe_an_error_ends_the_chat(command, tiny_model_folder, pipe_in, refused):
    for data, message in ((b"\xff\n", "standard input is not text"), (b"a" * 3000, "the text is too long")):
        pipe_in(data)
        refused(command, message)
    (tiny_model_folder / "chat_template.jinja").unlink()
    refused(command, "this model cannot chat")


def test_in_a_terminal_an_error_or_interrupt_ends_the_turn_only(command, typing, monkeypatch, capsys):
    typing("/help", "hello", "a" * 3000, "stop", "", "hello again", "/quit", "never read")
    asked, original = [], Conversation.ask

    def ask(conversation, message, streamer=None):
        asked.append(message)
        if message == "stop":
            raise KeyboardInterrupt
        return original(conversation, message, streamer)

    monkeypatch.setattr(Conversation, "ask", ask)
    assert main(command) == 0
    captured = capsys.readouterr()
    assert asked == ["hello", "a" * 3000, "stop", "hello again"]
    assert "the text is too long for the model" in captured.err
    assert "Stopped. The conversation is as it was before your message." in captured.err
    assert captured.err.count("full pass") == 2
    assert captured.err.count("/reset starts a new conversation") == 2
    assert captured.err.count("> ") == 7
    assert "> " not in captured.out
    typing()
    assert main(command) == 0
    typing(KeyboardInterrupt())
    assert main(command) == 130


@pytest.mark.parametrize(
    ("arguments", "times"),
    [(["--engine", "compiled"], 1), (["--engine", "compiled", "--mode", "early_exit"], 1), (["--mode", "post_hoc"], 0)],
)
def test_the_engine_is_warmed_up_before_the_first_message_and_a_notice_says_so(
    command, routers_folder, pipe_in, monkeypatch, capsys, arguments, times
):
    warmed_up = []

    def warm_up(model):
        warmed_up.append((model._tide.engine, WARMING_UP in capsys.readouterr().err))

    monkeypatch.setattr(TIDEGenerationMixin, "tide_warm_up", warm_up)
    pipe_in(b"/quit\n")
    assert main([*command, "--routers", str(routers_folder), *arguments]) == 0
    assert warmed_up == [("compiled", True)] * times
