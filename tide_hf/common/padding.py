"""Padding and end-of-sequence tokens of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def left_padded(
    prompts: Sequence[Sequence[int]], *, pad: int = 0, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Left-pad prompts into one batch.

    Args:
        prompts: Token ids of each prompt.
        pad: Padding token; any will do, since it is masked.
        device: Device of the tensors.

    Returns:
        `input_ids` and `attention_mask`, (rows, longest) int64 each.
    """
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, dtype=torch.int64, device=device),
        "attention_mask": torch.tensor(mask, dtype=torch.int64, device=device),
    }


def pad_token(tokenizer: Any) -> int:
    """The tokenizer's padding token, or a substitute; any will do, since padding is masked."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)


def end_tokens(eos_token_id: int | Sequence[int] | None) -> set[int]:
    """The end-of-sequence tokens of a generation config, as a set."""
    if eos_token_id is None:
        return set()
    return {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)


def up_to_end(tokens: list[int], ends: set[int], *, with_end: bool = True) -> list[int]:
    """Truncate an answer at its end-of-sequence token.

    Args:
        tokens: The answer, maybe padded.
        ends: End-of-sequence tokens.
        with_end: Whether that token is kept.
    """
    end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + with_end]
