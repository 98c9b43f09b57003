"""Prompts and answers of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def left_padded(
    prompts: Sequence[Sequence[int]], *, pad: int = 0, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Lay prompts side by side so that all end in the last column, where the answers begin.

    Args:
        prompts: Their tokens.
        pad: The token in front of the shorter ones; any will do, since the mask hides it.
        device: Where to put the tensors.

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
    """The tokenizer's padding token, or one to use in its place: any can pad, since every use goes with a mask."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)


def end_tokens(eos_token_id: int | Sequence[int] | None) -> set[int]:
    """The tokens that end an answer, by what a generation config says."""
    if eos_token_id is None:
        return set()
    return {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)


def up_to_end(tokens: list[int], ends: set[int], *, with_end: bool = True) -> list[int]:
    """An answer without what stands behind its end.

    Args:
        tokens: The answer, and padding where others are longer.
        ends: The tokens that end it.
        with_end: Whether the token that ends it is kept.
    """
    end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + with_end]
