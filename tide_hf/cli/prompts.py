"""Prompts of a command: from an argument, standard input, a file, or the built-in ones.

Nothing here imports torch, so that an empty prompt is refused at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.data_files import read_rows
from ..common.errors import ConfigurationError

PROMPTS = (
    "What can I do to sleep better? Give me a few tips.",
    "Copy this note word for word, but write Thursday instead of Tuesday:\n\n"
    "Dear neighbours, on Tuesday the water in our street will be turned off from nine in the morning until noon. "
    "Please fill a kettle and a bucket before nine on Tuesday, and let the tap run for a minute after noon. "
    "If the water is not back by one on Tuesday, call the office at the town hall. Kind regards, the town hall.",
    "Write a Python function that tells whether a word is a palindrome, and show how to use it.",
)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, or from a text file or piped standard input, without a final line break."""
    if prompt is not None:
        if file is not None:
            raise _refused("the prompt is given twice", f"PROMPT and --prompt-file {file}", "one", "Leave one out.")
        return _checked(prompt, "PROMPT")
    if file is not None:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise _refused("the prompt cannot be read", f"'{error}'", "a text file", "Check --prompt-file.") from error
    elif sys.stdin.isatty():
        raise _refused(
            "there is no prompt",
            "neither PROMPT nor --prompt-file, and a terminal as standard input",
            "one of them, or text piped into standard input",
            "Write the prompt after the model's name, in quotes.",
        )
    else:
        data = sys.stdin.buffer.read()
    text = decode(data, "standard input" if file is None else str(file)).removesuffix("\n")
    return _not_empty(text)


def given_prompts(prompts: Sequence[str] | None) -> list[str]:
    """The prompts of --prompt; [`ConfigurationError`] if one is empty or not UTF-8."""
    return [_checked(prompt, "--prompt") for prompt in prompts or ()]


def read_prompts(file: Path) -> list[str]:
    """Read prompts from a `.txt` file (split at blank lines or into lines) or from rows with a `prompt` or a `text`.

    Raises [`ConfigurationError`] if there is no such file, or a row or the file has no prompt; see also [`read_rows`].
    """
    if not file.is_file():
        raise _refused("the prompts cannot be read", f"no file at {file}", "a file", "Check --prompts.")
    prompts = [_prompt_of(row, file) for row in read_rows(file)]
    if not prompts:
        raise _refused("there are no prompts", f"an empty {file}", "at least one prompt", "Add one.")
    return prompts


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8, and convert CRLF line breaks to line feeds; an error names the `source`."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise _refused(f"{source} is not text", f"'{error}'", "UTF-8", "Convert it to UTF-8.") from error


def check_room(model: Any, num_tokens: int, max_new_tokens: int) -> None:
    """Raise [`ConfigurationError`] if a prompt has no token, or prompt and answer exceed the model's positions."""
    if num_tokens == 0:
        raise _empty("a prompt of no tokens")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and num_tokens + max_new_tokens > limit:
        raise _refused(
            "the text is too long for the model",
            f"{num_tokens} tokens, and up to {max_new_tokens} new ones",
            f"at most {limit} together",
            "Shorten the prompt, lower --max-new-tokens, or, in a chat, start a new conversation with /reset.",
        )


def _checked(prompt: str, option: str) -> str:
    return _not_empty(decode(os.fsencode(prompt), option))


def _not_empty(text: str) -> str:
    if not text.strip():
        raise _empty(repr(text))
    return text


def _empty(got: str) -> ConfigurationError:
    return _refused("the prompt is empty", got, "some text", "Write a prompt.")


def _prompt_of(row: object, file: Path) -> str:
    prompt = row.get("prompt") or row.get("text") if isinstance(row, dict) else row
    if not isinstance(prompt, str) or not prompt.strip():
        expected = "a text, or an object with a 'prompt' or a 'text'"
        raise _refused(f"a row of {file} has no prompt", repr(row)[:80], expected, "Correct or remove that row.")
    return prompt


def _refused(problem: str, got: str, expected: str, do: str) -> ConfigurationError:
    return ConfigurationError(problem, got=got, expected=expected, do=do)
