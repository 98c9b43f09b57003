"""``tide-hf chat``: a conversation in the terminal, or over a pipe with one message a line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module

from rich.console import Console

from ..common.errors import TIDEError
from .conversation import Conversation
from .model_arguments import NO_ROUTERS, attached_method, load
from .parser import CHAT_HELP
from .prompts import decode
from .streaming import answer_record, print_figures, stream_answer

MAKING_READY = "Making the engine ready; the first time on a machine this can take a minute ..."


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    interactive = sys.stdin.isatty()
    notices = Console(stderr=True)
    loaded = load(args)
    method = attached_method(loaded, args)
    conversation = Conversation(method, loaded.tokenizer, args.max_new_tokens)
    notices.print(f"routers: {loaded.routers_origin or NO_ROUTERS}", style="dim", markup=False, highlight=False)
    if method.lossless:  # the other modes run layer by layer
        if not notices.is_terminal:  # where a progress line tells
            notices.print(MAKING_READY, style="dim", soft_wrap=True)
        method.model.tide_warm_up()
    if interactive:
        notices.print(CHAT_HELP, style="dim", markup=False, highlight=False, soft_wrap=True)
    answer = _answer_in_json if args.json else _answer_in_text
    for line in _typed() if interactive else _piped():
        if line.startswith("/"):
            if line == "/quit":
                return
            _obey(line, conversation, notices)
        elif interactive:
            _answer_or_explain(answer, conversation, line, notices)
        else:
            answer(conversation, line, notices)


def _typed() -> Iterator[str]:
    """Messages and commands from the terminal."""
    with suppress(ImportError):  # for line editing, if available
        import_module("readline")
    with suppress(EOFError):
        while True:
            print(file=sys.stderr)
            if line := _line().strip():
                yield line


def _line() -> str:
    """A line from the terminal; the prompt goes to standard error if standard output is no terminal."""
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()


def _piped() -> Iterator[str]:
    """Messages and commands from the lines of a pipe."""
    for data in sys.stdin.buffer:
        if line := decode(data, "standard input").strip():
            yield line


def _obey(command: str, conversation: Conversation, notices: Console) -> None:
    if command == "/reset":
        conversation.reset()
        notices.print("The conversation starts anew.", style="dim")
    elif command == "/help":
        notices.print(CHAT_HELP, style="dim", markup=False, highlight=False, soft_wrap=True)
    else:
        notices.print(
            f"There is no command {command}. {CHAT_HELP}", style="dim", markup=False, highlight=False, soft_wrap=True
        )


def _answer_or_explain(
    answer: Callable[[Conversation, str, Console], None], conversation: Conversation, message: str, notices: Console
) -> None:
    """Answer; an error or interrupt ends the turn, not the conversation."""
    try:
        answer(conversation, message, notices)
    except KeyboardInterrupt:
        notices.print("\nStopped. The conversation is as it was before your message.", style="dim")
    except TIDEError as error:
        notices.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)


def _answer_in_text(conversation: Conversation, message: str, notices: Console) -> None:
    print_figures(stream_answer(partial(conversation.ask, message), conversation.tokenizer, Console()), notices)


def _answer_in_json(conversation: Conversation, message: str, notices: Console) -> None:
    record = answer_record(conversation.method, conversation.tokenizer, conversation.ask(message))
    print(json.dumps({"prompt": message} | record), flush=True)
