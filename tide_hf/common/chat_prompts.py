"""Prompts and chats as token ids, through the tokenizer's chat template if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

from .errors import ChatTemplateError, describe, first_line
from .padding import left_padded


def prompt_tokens(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """Token ids of one user message.

    Args:
        tokenizer: The base model's tokenizer.
        prompt: The message.
        raw: Whether to skip the chat template.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return tokenizer(prompt)["input_ids"]
    return message_tokens(tokenizer, [{"role": "user", "content": prompt}])


def message_tokens(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a chat.

    Args:
        tokenizer: The base model's tokenizer, with a chat template.
        messages: Each with "role" and "content".
        add_generation_prompt: Whether to open the assistant's turn.

    Raises:
        ChatTemplateError: As in `chat_text`.
    """
    text = chat_text(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def chat_text(tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    """The text of a chat; arguments as in `message_tokens`.

    Raises:
        ChatTemplateError: The template does not parse, or refuses the chat.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, ValueError, LookupError) as error:  # a template may raise anything of these
        reason = first_line(error)
        raise ChatTemplateError(
            describe(
                "the tokenizer's chat template refuses the chat",
                got=f"'{reason}'",
                expected="a template that can be read and takes these messages",
                do="Mend or replace the template; tide-hf generate --raw does without it.",
            ),
            reason,
        ) from error


def encode_prompt(tokenizer: Any, prompt: str, *, raw: bool = False) -> dict[str, Tensor]:
    """[`prompt_tokens`] as `generate` takes them: `input_ids` and `attention_mask`, (1, length) each."""
    return left_padded([prompt_tokens(tokenizer, prompt, raw=raw)])


def encode_messages(tokenizer: Any, messages: Sequence[dict[str, str]]) -> dict[str, Tensor]:
    """[`message_tokens`] as `generate` takes them, with the assistant's turn opened."""
    return left_padded([message_tokens(tokenizer, messages)])
