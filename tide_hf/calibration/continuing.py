"""Texts that a model goes on with, many at a time, as fast as that can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..base_model.adapters import base_inside
from ..base_model.structure import input_device
from ..common.padding import left_padded, up_to_end
from ..engines.shared_heads import shared_heads

BEST = 50  # tokens that are drawn from
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class DrawFromBest(LogitsProcessor):
    """Makes a greedy choice a draw from the best tokens (top-k sampling).

    `generate` draws a random number for each token of the vocabulary. That took a quarter of the time that 96 texts
    did on a CPU. The largest of the logits plus Gumbel noise is such a draw as well, from those that are noised.

    Args:
        temperature: Of the draw.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Let one token stand out; (rows, vocabulary) each."""
        best, tokens = scores.topk(min(BEST, scores.shape[-1]))
        noise = -torch.empty_like(best).exponential_().log()
        drawn = tokens.gather(1, (best / self.temperature + noise).argmax(dim=-1, keepdim=True))
        return scores.scatter_(1, drawn, torch.inf)


@torch.no_grad()
def continued(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    most: int,
    *,
    temperature: float | None,
    ends: set[int],
    pad: int = 0,
) -> list[list[int]]:
    """Let a model go on with texts, whatever its own generation config says.

    Args:
        model: The base model, at full depth.
        texts: Their tokens.
        most: Tokens that it may add to each.
        temperature: `None` is greedy.
        ends: Tokens that end a text.
        pad: Token that fills a row up.

    Returns:
        What it added to each text, up to a token that ends it, which is not among them. Where there is none, it is as
        long as that of the others.
    """
    draw = LogitsProcessorList([] if temperature is None else [DrawFromBest(temperature)])
    options = {"max_new_tokens": most, "eos_token_id": sorted(ends) or None, "logits_processor": draw}
    with plain_generation(model), shared_heads(model):
        return batch_answers(model, texts, ends, pad=pad, **options)


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


def batch_answers(
    model: Any, prompts: Sequence[Sequence[int]], ends: set[int], *, pad: int, **options: Any
) -> list[list[int]]:
    """Let `model.generate` go on with prompts, all in one batch.

    Args:
        model: The model, attached or not.
        prompts: Their tokens.
        ends: The tokens that end an answer.
        pad: Token that fills a row up. One that the model does not know, as where a tokenizer was extended and the
            model was not, is replaced: models read what fills up the rows that have ended.
        **options: For `generate`.

    Returns:
        The new tokens of each, without the one that ends it.
    """
    pad = pad if pad < model.config.get_text_config().vocab_size else 0
    inputs = left_padded(prompts, pad=pad, device=input_device(model))
    generated = model.generate(**inputs, **{"pad_token_id": pad, **options})
    new_tokens = generated[:, inputs["input_ids"].shape[1] :].tolist()
    return [up_to_end(tokens, ends, with_end=False) for tokens in new_tokens]
