"""``tide-hf chat``: over a pipe, in a terminal, and how it ends."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
from repository import ROOT

from tide_hf.cli.conversation import Conversation
from tide_hf.cli.main import main
from tide_hf.generation import TIDEGenerationMixin

OPTIONS = ("--max-new-tokens", "8")


@pytest.fixture
def command(tiny_model_folder):
    return ["chat", str(tiny_model_folder), *OPTIONS]


@pytest.fixture
def typing(monkeypatch):
    """A function that types lines into this process's terminal; what it is given as an exception is raised."""

    def make(*lines):
        left = list(lines)

        def read():
            line = left.pop(0) if left else EOFError()
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("sys.stdin", io.StringIO())
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("builtins.input", read)

    return make


def test_over_a_pipe_each_line_is_a_message(command, capsys):
    """What is said again after /reset is answered as the first time, and as `generate` answers it."""
    talk = "hello\n\n  and abc?\n/what\n/reset\nhello\n/quit\nnever read\n"
    start = [sys.executable, "-m", "tide_hf.cli", *command, "--json"]
    done = subprocess.run(start, input=talk, capture_output=True, text=True, check=True, cwd=ROOT)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["hello", "and abc?", "hello"]
    assert records[0]["tokens"] == records[2]["tokens"] != records[1]["tokens"]
    assert all(record["stats"]["mode"] == "self_speculative" for record in records)
    assert "There is no command /what. /reset starts anew" in done.stderr
    assert "The conversation starts anew." in done.stderr
    assert main(["generate", *command[1:], "--json", "hello"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == records[0]["tokens"]


def test_text_goes_to_standard_output_and_figures_do_not(command, pipe_in, capsys):
    pipe_in(b"hello\nand?\n")
    assert main(command) == 0
    captured = capsys.readouterr()
    pipe_in(b"hello\nand?\n")
    assert main([*command, "--json"]) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert captured.out == "".join(text + "\n" for text in texts)
    assert captured.err.count("full depth (4 layers)") == 2


def test_in_a_terminal_errors_and_interrupts_cost_a_turn_and_not_the_conversation(command, typing, monkeypatch, capsys):
    typing("/help", "hello", "a" * 3000, "stop", "", "hello again", "/quit", "never read")
    asked, original = [], Conversation.ask

    def ask(conversation, message, streamer=None):
        asked.append(message)
        if message == "stop":
            raise KeyboardInterrupt
        return original(conversation, message, streamer)

    monkeypatch.setattr("tide_hf.cli.conversation.Conversation.ask", ask)
    assert main(command) == 0
    captured = capsys.readouterr()
    assert asked == ["hello", "a" * 3000, "stop", "hello again"]
    assert "the text is too long for the model" in captured.err
    assert "Stopped. The conversation is as it was before your message." in captured.err
    assert captured.err.count("full depth") == 2
    assert captured.err.count("/reset starts anew") == 2
    assert captured.err.count("> ") == 7
    assert "> " not in captured.out


def test_the_terminal_ends_with_the_input_or_an_interrupt(command, typing):
    typing()
    assert main(command) == 0
    typing(KeyboardInterrupt())
    assert main(command) == 130


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        (["--mode", "early_exit"], b"hello\n", "there are no routers for the model"),
        ([], b"\xff\n", "standard input is no text"),
        ([], b"a" * 3000, "the text is too long for the model"),
    ],
)
def test_over_a_pipe_errors_end_it(command, pipe_in, refused, arguments, data, message):
    pipe_in(data)
    refused([*command, *arguments], message)


def test_a_model_without_a_chat_template_is_refused(command, tiny_model_folder, pipe_in, capsys):
    (tiny_model_folder / "chat_template.jinja").unlink()
    pipe_in(b"hello\n")
    assert main(command) == 2
    assert "this model cannot chat" in capsys.readouterr().err


# What a shell starts in the background ignores interrupts, and hands that on to what it starts itself.
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_in_a_real_terminal_an_interrupt_ends_it_with_130(command):
    controller, terminal = os.openpty()
    start = [sys.executable, "-c", INTERRUPTIBLE, "-m", "tide_hf.cli", *command]
    environment = os.environ | {"TERM": "xterm-256color"}
    chat = subprocess.Popen(start, stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT, env=environment)
    os.close(terminal)
    try:
        greeting = b"/reset starts anew"
        read_until(controller, b"> ", read_until(controller, greeting).partition(greeting)[2])
        os.write(controller, b"hello\n")
        answered = read_until(controller, b"tokens/s")
        assert b"full depth (4 layers): 8" in answered
        assert b"\x1b[" in answered
        read_until(controller, b"> ", answered.partition(b"tokens/s")[2])
        assert interrupt(chat) == 130
    finally:
        chat.kill()
        chat.wait()
        os.close(controller)


def interrupt(process):
    """Interrupt it as a user does: again where nothing happens, since readline may miss one just before it waits."""
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            continue
    return None


def read_until(controller, end, seen=b""):
    """What the terminal shows up to `end` and what came with it, behind `seen`: a piece may end anywhere."""
    while end not in seen:
        seen += os.read(controller, 4096)
    return seen


@pytest.mark.parametrize(("arguments", "times"), [(["--engine", "compiled"], 1), (["--mode", "post_hoc"], 0)])
def test_the_engine_is_made_ready_before_the_first_message(
    tiny_model_folder, routers_folder, pipe_in, monkeypatch, arguments, times
):
    ready = []
    monkeypatch.setattr(TIDEGenerationMixin, "tide_warm_up", lambda model: ready.append(model._tide.engine))
    pipe_in(b"/quit\n")
    assert main(["chat", str(tiny_model_folder), "--routers", str(routers_folder), *arguments]) == 0
    assert ready == ["compiled"] * times
