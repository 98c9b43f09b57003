"""``tide-hf chat``: a conversation in the terminal, or over a pipe with one message per line.

The K/V cache is kept from turn to turn, so that each turn prefills only its new tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from rich.console import Console

from ..base_model.structure import CACHE, find_structure
from ..common.errors import ConfigurationError, TIDEError
from ..common.token_ids import encode_messages
from ..evaluation.benchmark import DecodingMethod, Run, timed_run
from ..speculation.prefill import PrefixCache
from .model_arguments import NO_ROUTERS, attached_method, load
from .parser import CHAT_HELP
from .prompts import check_room, decode
from .streaming import answer_record, print_figures, stream_answer

WARMING_UP = "Warming up the engine; the first time on a machine this can take a minute ..."


class Conversation:
    """A chat with an attached model.

    Every turn encodes the whole conversation with the chat template and reuses the cached prefix. If the template
    renders an earlier turn differently, the cache is cropped to the common prefix.
    """

    def __init__(self, method: DecodingMethod, tokenizer: Any, max_new_tokens: int) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                "this model cannot chat",
                got="a tokenizer without a chat template",
                expected="one with a chat template, as instruction-tuned models have",
                do="Use tide-hf generate, or an instruction-tuned model.",
            )
        self.method = method
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self._recurrent = find_structure(method.model).is_recurrent
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages: list[dict[str, str]] = []
        self._prefix = None if self._recurrent else PrefixCache(self.method.model.config)

    def ask(self, question: str, streamer: Any = None) -> Run:
        """Answer a message. If that fails or is interrupted, the conversation is unchanged."""
        messages = [*self.messages, {"role": "user", "content": question}]
        inputs = encode_messages(self.tokenizer, messages)
        tokens = inputs["input_ids"][0].tolist()
        check_room(self.method.model, len(tokens), self.max_new_tokens)
        caches = {} if self._prefix is None else {CACHE: self._prefix.take(tokens)}
        method = replace(self.method, options=self.method.options | caches)
        run = timed_run(method, inputs, self.max_new_tokens, streamer)
        if self._prefix is not None:
            self._prefix.store(caches[CACHE], tokens + run.new_tokens)
        answer = self.tokenizer.decode(run.new_tokens, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return run


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    interactive = sys.stdin.isatty()  # if so, an error or an interrupt ends the turn, not the conversation
    console = Console(stderr=True)
    loaded = load(args)
    method = attached_method(loaded, args)
    conversation = Conversation(method, loaded.tokenizer, args.max_new_tokens)
    _notice(console, f"routers: {loaded.routers_origin or NO_ROUTERS}")
    if method.model._tide.runs_on_steps:
        if not console.is_terminal:  # a terminal shows a progress bar instead
            _notice(console, WARMING_UP)
        method.model.tide_warm_up()
    if interactive:
        _notice(console, CHAT_HELP)
    for line in _typed_lines() if interactive else _piped_lines():
        if line == "/quit":
            return
        try:
            _respond(line, conversation, console, as_json=args.json)
        except (KeyboardInterrupt, TIDEError) as error:
            if not interactive:
                raise
            stopped = "\nStopped. The conversation is as it was before your message."
            _notice(console, str(error) if isinstance(error, TIDEError) else stopped)


def _respond(line: str, conversation: Conversation, console: Console, as_json: bool) -> None:
    """Obey a command, or answer a message."""
    if line == "/reset":
        conversation.reset()
        _notice(console, "This is a new conversation.")
    elif line.startswith("/"):
        _notice(console, CHAT_HELP if line == "/help" else f"There is no command {line}. {CHAT_HELP}")
    elif as_json:
        record = answer_record(conversation.method, conversation.tokenizer, conversation.ask(line))
        print(json.dumps({"prompt": line} | record), flush=True)
    else:
        print_figures(stream_answer(partial(conversation.ask, line), conversation.tokenizer, Console()), console)


def _notice(console: Console, text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def _typed_lines() -> Iterator[str]:
    """Lines from the terminal; the `> ` prompt goes to standard error if standard output is not a terminal."""
    with suppress(ImportError):  # readline adds line editing to input()
        import_module("readline")
    with suppress(EOFError):
        while True:
            print(file=sys.stderr)
            if not sys.stdout.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            if line := input("> " if sys.stdout.isatty() else "").strip():
                yield line


def _piped_lines() -> Iterator[str]:
    """Lines from a pipe."""
    for data in sys.stdin.buffer:
        if line := decode(data, "standard input").strip():
            yield line
