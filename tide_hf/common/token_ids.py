"""Token ids of prompts and chats: encoding, left padding into batches, truncation at end-of-sequence tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from .errors import ChatTemplateError, quoted


def prompt_tokens(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """Token ids of one user message, through the chat template if there is one and the prompt is not `raw`."""
    if raw or not getattr(tokenizer, "chat_template", None):
        return tokenizer(prompt)["input_ids"]
    return message_tokens(tokenizer, [{"role": "user", "content": prompt}])


def message_tokens(
    tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a chat; arguments as in `chat_text`."""
    text = chat_text(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def chat_text(tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    """Apply the chat template to a chat; raise [`ChatTemplateError`] if the template is invalid or refuses the chat."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, ValueError, LookupError) as error:  # a template may raise any of these
        raise ChatTemplateError(
            "the tokenizer's chat template refuses the chat",
            got=quoted(error),
            expected="a template that can be read and takes these messages",
            do="Correct or replace the template; tide-hf generate --raw does not use it.",
        ) from error


def encode_prompt(tokenizer: Any, prompt: str, *, raw: bool = False) -> dict[str, Tensor]:
    """[`prompt_tokens`] as inputs of `generate`: `input_ids` and `attention_mask`, (1, length) each."""
    return left_padded([prompt_tokens(tokenizer, prompt, raw=raw)])


def encode_messages(tokenizer: Any, messages: Sequence[dict[str, str]]) -> dict[str, Tensor]:
    """[`message_tokens`] as inputs of `generate`, with a generation prompt at the end."""
    return left_padded([message_tokens(tokenizer, messages)])


def left_padded(
    prompts: Sequence[Sequence[int]], *, pad: int = 0, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Left-pad prompts into one batch: `input_ids` and `attention_mask`, (rows, longest) int64 each."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, dtype=torch.int64, device=device),
        "attention_mask": torch.tensor(mask, dtype=torch.int64, device=device),
    }


def pad_token(tokenizer: Any) -> int:
    """The tokenizer's padding token, or a substitute: any token will do, since padding is masked."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)


def eos_token_ids(eos_token_id: int | Sequence[int] | None) -> set[int]:
    """The end-of-sequence tokens of a generation config, as a set."""
    if eos_token_id is None:
        return set()
    return {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)


def truncate_at_eos(tokens: list[int], eos: set[int], *, keep_eos: bool = True) -> list[int]:
    """Truncate an answer, padded or not, at its first end-of-sequence token, which is retained if `keep_eos`."""
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: end + keep_eos]
