"""Prompts of a command: from an argument, standard input, a file, or the built-in ones.

Nothing here imports torch, so that an empty prompt is refused at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.errors import ConfigurationError, describe
from ..common.rows import read_rows

PROMPTS = (
    "What can I do to sleep better? Give me a few tips.",
    "Copy this note word for word, but write Thursday instead of Tuesday:\n\n"
    "Dear neighbours, on Tuesday the water in our street will be turned off from nine in the morning until noon. "
    "Please fill a kettle and a bucket before nine on Tuesday, and let the tap run for a minute after noon. "
    "If the water is not back by one on Tuesday, call the office at the town hall. Kind regards, the town hall.",
    "Write a Python function that tells whether a word is a palindrome, and show how to use it.",
)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Read one prompt: the argument, the file, or else piped standard input.

    Args:
        prompt: The argument, if given.
        file: A UTF-8 text file, if given. A final line break is removed.

    Returns:
        The prompt.

    Raises:
        ConfigurationError: There is none or more than one, or it is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise ConfigurationError(
            describe(
                "the prompt is given twice",
                got=f"PROMPT and --prompt-file {file}",
                expected="one of them",
                do="Leave one out.",
            )
        )
    if prompt is not None:
        text = _of_argument(prompt, "PROMPT")
    elif file is not None:
        text = decode(_read_file(file), str(file)).removesuffix("\n")
    elif sys.stdin.isatty():
        raise ConfigurationError(
            describe(
                "there is no prompt",
                got="neither PROMPT nor --prompt-file, and a terminal as standard input",
                expected="one of them, or text piped into standard input",
                do="Write the prompt behind the model's name, in quotes.",
            )
        )
    else:
        text = decode(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
    return _not_empty(text)


def given_prompts(prompts: Sequence[str] | None) -> list[str]:
    """The prompts of --prompt.

    Raises:
        ConfigurationError: One is empty, or not UTF-8.
    """
    return [_not_empty(_of_argument(prompt, "--prompt")) for prompt in prompts or ()]


def read_prompts(file: Path) -> list[str]:
    """Read prompts from a file.

    Args:
        file: A `.txt` file (prompts between blank lines, or one a line), or rows with a `prompt` or a `text` in
            `.jsonl`, `.json`, `.csv` or `.parquet`.

    Returns:
        The prompts.

    Raises:
        ConfigurationError: The file does not exist, a row holds no prompt, or there is none.
        CalibrationError: The file cannot be read.
        MissingPackageError: A file other than .txt is to be read, and the datasets library is not installed.
    """
    if not file.is_file():
        raise ConfigurationError(
            describe("the prompts cannot be read", got=f"no file at {file}", expected="a file", do="Check --prompts.")
        )
    prompts = [_prompt_of(row, file) for row in read_rows(file)]
    if not prompts:
        raise ConfigurationError(
            describe("there are no prompts", got=f"an empty {file}", expected="a prompt or more", do="Add some.")
        )
    return prompts


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8, and convert line breaks to line feeds.

    Args:
        data: The bytes.
        source: Their source, for the error.

    Raises:
        ConfigurationError: They are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            describe(f"{source} is no text", got=f"'{error}'", expected="UTF-8", do="Convert it to UTF-8.")
        ) from error


def check_room(model: Any, num_tokens: int, max_new_tokens: int) -> None:
    """Refuse an empty prompt, and one that leaves too few of the model's positions.

    Args:
        model: The model.
        num_tokens: Tokens of the prompt.
        max_new_tokens: Most new tokens.

    Raises:
        ConfigurationError: There is no token, or prompt and new tokens exceed the model's positions.
    """
    if num_tokens == 0:
        raise _empty("a prompt of no tokens")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and num_tokens + max_new_tokens > limit:
        raise ConfigurationError(
            describe(
                "the text is too long for the model",
                got=f"{num_tokens} tokens, and up to {max_new_tokens} new ones",
                expected=f"at most {limit} together",
                do="Shorten the prompt, lower --max-new-tokens, or, in a chat, start anew with /reset.",
            )
        )


def _of_argument(prompt: str, name: str) -> str:
    return decode(os.fsencode(prompt), name)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise _empty(repr(text))
    return text


def _empty(got: str) -> ConfigurationError:
    return ConfigurationError(
        describe("the prompt is empty", got=got, expected="some text", do="Write what is to be answered.")
    )


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            describe("the prompt cannot be read", got=f"'{error}'", expected="a text file", do="Check --prompt-file.")
        ) from error


def _prompt_of(row: object, file: Path) -> str:
    prompt = row.get("prompt") or row.get("text") if isinstance(row, dict) else row
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigurationError(
            describe(
                f"a row of {file} holds no prompt",
                got=repr(row)[:80],
                expected="a text, or an object with a 'prompt' or a 'text'",
                do="Mend that row, or leave it out.",
            )
        )
    return prompt
