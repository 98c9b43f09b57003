"""Prompts of a batch, read in groups of about one length: padding costs a CPU as much time as text does."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .adapters import has_adapters_by_row
from .block_drafting import BlockRun
from .skipping import LayerRun
from .structure import length_dependent_ropes

# One more pass costs a CPU what so many tokens in it do: it reads all weights again. A GPU reads thousands in that
# time, and there the whole batch is read at once.
PASS_TOKENS = 40
# What `generate` may hand to the model besides the prompt's own tensors. None of it is different for different rows.
_SHARED = (bool, int, float, str, type(None))
_STORED = ("keys", "values")


def groups_by_length(lengths: Sequence[int], pass_tokens: int) -> list[list[int]]:
    """Which rows are best read together, each group padded to its longest.

    Args:
        lengths: Tokens of each row.
        pass_tokens: What one more pass costs, in tokens.

    Returns:
        The rows of each group, so that passes and what each reads, padding included, cost the least in all.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best: list[tuple[int, list[int]]] = [(0, [0])]  # of the first rows: what they cost, and where their groups begin
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        ways = [
            (cost + pass_tokens + (end - start) * longest, [*starts, end]) for start, (cost, starts) in enumerate(best)
        ]
        best.append(min(ways, key=lambda way: (way[0], len(way[1]))))
    return [order[start:end] for start, end in pairwise(best[-1][1])]


def read_prompts(
    model: Any, run: LayerRun, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> tuple[Cache, Tensor]:
    """Read the prompts of a call.

    Args:
        model: The attached model.
        run: The active run, with the call's cache.
        input_ids: (rows, length).
        generation_config: Of this call.
        model_kwargs: What `generate` prepared.

    Returns:
        The filled cache, and (rows, 1, vocabulary) logits behind the prompts.
    """
    groups = _groups_of(model, input_ids, model_kwargs)
    if len(groups) < 2:
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        return outputs.past_key_values, outputs.logits[:, -1:]
    whole, mask, positions = (model_kwargs[name] for name in ("past_key_values", "attention_mask", "position_ids"))
    empty, caches, logits, deep = deepcopy(whole), [], [], []
    for group in groups:
        rows, cache = torch.tensor(group), deepcopy(empty)
        first = input_ids.shape[1] - int(mask[rows].sum(dim=1).max())
        own = {"past_key_values": cache, "attention_mask": mask[rows, first:], "position_ids": positions[rows, first:]}
        with run.reading_into(cache):
            outputs = model._prefill(input_ids[rows, first:], generation_config, {**model_kwargs, **own})
        caches.append(cache)
        logits.append(outputs.logits[:, -1:])
        if isinstance(run, BlockRun) and run.deep_before is not None:
            deep.append(run.deep_before)
    _fill(whole, caches, groups, input_ids.shape[1])
    order = torch.tensor([row for group in groups for row in group]).argsort()
    if isinstance(run, BlockRun):
        run.deep_before = torch.cat(deep)[order]
    return whole, torch.cat(logits)[order]


def _groups_of(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The groups in which the prompts of a call are best read; one, where they cannot be read apart."""
    rows, length = input_ids.shape
    together = [list(range(rows))]
    if rows == 1 or input_ids.device.type != "cpu" or not _can_be_read_apart(model, input_ids, model_kwargs):
        return together
    mask = model_kwargs["attention_mask"].long()
    lengths = mask.sum(dim=1)
    is_left_padded = torch.equal(mask, (torch.arange(length) >= length - lengths[:, None]).long())
    return groups_by_length(lengths.tolist(), PASS_TOKENS) if is_left_padded and lengths.min() > 0 else together


def _can_be_read_apart(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether nothing but the mask, and positions of its own, tells a row in a batch from the same row by itself."""
    cache: Any = model_kwargs.get("past_key_values")
    own = {name: model_kwargs.get(name) for name in ("attention_mask", "position_ids")}
    others = [value for name, value in model_kwargs.items() if name not in own and value is not cache]
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and cache.get_seq_length() == 0
        and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        and all(isinstance(value, Tensor) and value.shape == input_ids.shape for value in own.values())
        and all(isinstance(value, _SHARED) for value in others)
        and not has_adapters_by_row(model, model._tide.structure)
        and not length_dependent_ropes(model.config.get_text_config())
        and not getattr(model, "is_quantized", False)  # a pass then costs more than reading weights does
        and set((getattr(model, "hf_device_map", None) or {"": "cpu"}).values()) == {"cpu"}  # or than this, offloaded
    )


def _fill(whole: Cache, caches: list[DynamicCache], groups: list[list[int]], length: int) -> None:
    """Store the K/V of all groups, with zeros for the padding in front."""
    for number in range(len(caches[0].layers)):
        parts: list[Any] = [cache.layers[number] for cache in caches]
        if parts[0].is_initialized:
            keys, values = (_laid_out([getattr(part, name) for part in parts], groups, length) for name in _STORED)
            whole.update(keys, values, number)
            for part in parts:
                part.keys = part.values = None  # gives back the memory


def _laid_out(parts: list[Tensor], groups: list[list[int]], length: int) -> Tensor:
    """(rows, heads, length, D) of the groups' (some rows, heads, up to length, D), which all end at the last token."""
    _, heads, _, size = parts[0].shape
    laid_out = parts[0].new_zeros((sum(map(len, groups)), heads, length, size))
    for part, group in zip(parts, groups, strict=True):
        laid_out[group, :, length - part.shape[2] :] = part
    return laid_out
