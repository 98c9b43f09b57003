"""What a user says, as tokens: through the tokenizer's chat template where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .padding import left_padded


def prompt_tokens(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """The tokens of one user's message.

    Args:
        tokenizer: The base model's.
        prompt: The message.
        raw: Whether to leave the chat template out, where there is one.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return tokenizer(prompt)["input_ids"]
    return message_tokens(tokenizer, [{"role": "user", "content": prompt}])


def message_tokens(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True
) -> list[int]:
    """The tokens of a chat.

    Args:
        tokenizer: The base model's; it has a chat template.
        messages: Each with "role" and "content".
        add_generation_prompt: Whether the assistant is to speak next.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_prompt(tokenizer: Any, prompt: str, *, raw: bool = False) -> dict[str, Tensor]:
    """[`prompt_tokens`] as `generate` takes them: `input_ids` and `attention_mask`, (1, length) each."""
    return left_padded([prompt_tokens(tokenizer, prompt, raw=raw)])


def encode_messages(tokenizer: Any, messages: Sequence[dict[str, str]]) -> dict[str, Tensor]:
    """[`message_tokens`] as `generate` takes them, with the start of the answer that is to come."""
    return left_padded([message_tokens(tokenizer, messages)])
