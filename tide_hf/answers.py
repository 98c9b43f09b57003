"""Answers of `generate` to many prompts, batch by batch, without what fills the batches up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from .adapters import base_inside
from .padding import left_padded, up_to_end
from .structure import input_device

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
