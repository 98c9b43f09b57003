"""Prompts and answers of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .adapters import base_inside
from .structure import input_device

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


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


@contextmanager
def plain_generation(model: Any) -> Iterator[None]:
    """Let `generate` find none of the defaults that a model comes with, but its special tokens; it gets them back.

    A config that is passed to `generate` is not enough: what it leaves open is taken from the model's own.

    Args:
        model: The model, or a wrapper, which may have a config of its own.
    """
    plain = GenerationConfig(**{name: getattr(model.generation_config, name) for name in SPECIAL_TOKENS})
    kept = [(one, one.generation_config) for one in (model, base_inside(model)) if "generation_config" in vars(one)]
    try:
        for one, _ in kept:
            one.generation_config = plain
        yield
    finally:
        for one, config in kept:
            one.generation_config = config


def batches_of_like_length(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Cut prompts into batches with little padding.

    Args:
        prompts: Their tokens.
        batch_size: Most prompts a batch.

    Yields:
        Positions in `prompts`.
    """
    order = sorted(range(len(prompts)), key=lambda position: len(prompts[position]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def batch_answers(
    model: Any, prompts: Sequence[Sequence[int]], ends: set[int], *, pad: int, with_end: bool = True, **options: Any
) -> list[list[int]]:
    """Let `model.generate` go on with prompts, all in one batch.

    Args:
        model: The model, attached or not.
        prompts: Their tokens.
        ends: The tokens that end an answer.
        pad: Token that fills a row up. One that the model does not know, as where a tokenizer was extended and the
            model was not, is replaced: models read what fills up the rows that have ended.
        with_end: Whether the token that ends an answer is kept.
        **options: For `generate`.

    Returns:
        The new tokens of each, without padding.
    """
    pad = pad if pad < model.config.get_text_config().vocab_size else 0
    inputs = left_padded(prompts, pad=pad, device=input_device(model))
    generated = model.generate(**inputs, **{"pad_token_id": pad, **options})
    new_tokens = generated[:, inputs["input_ids"].shape[1] :].tolist()
    return [up_to_end(tokens, ends, with_end=with_end) for tokens in new_tokens]
