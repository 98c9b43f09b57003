"""Prompts of a batch, each read once, in groups of about one length: padding costs a CPU as much time as text does."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..base_model.adapters import has_adapters_by_row
from ..base_model.inputs import is_absent
from ..base_model.structure import CACHE, counts_slots, may_replace_cache, rope_limits
from ..depth.block_drafting import BlockRun
from ..depth.gates import LayerRun

# One more pass costs a CPU what so many tokens in it do: it reads all weights again. A GPU reads thousands in that
# time, and there the whole batch is read at once.
PASS_TOKENS = 40
_BY_ROW = ("attention_mask", "position_ids")
_SHARED = (bool, int, float, str, type(None))  # what else `generate` hands to the model, if it is the same for all rows
_STORED = ("keys", "values")


@dataclass(frozen=True)
class Group:
    """Rows of a batch whose prompts are read in one pass.

    Attributes:
        read: Those that the pass reads.
        rows: Those that get what it leaves: these, and rows with the same prompt.
        own: For each of `rows` the place of its prompt in `read`.
        length: Tokens of the longest, which the others are padded to.
    """

    read: list[int]
    rows: list[int]
    own: list[int]
    length: int


def groups_by_length(lengths: Sequence[int], pass_tokens: int) -> list[list[int]]:
    """Which rows are best read together, each group padded to its longest.

    Args:
        lengths: Tokens of each row.
        pass_tokens: What one more pass costs, in tokens.

    Returns:
        The rows of each group, the longest last, so that passes and what each reads, padding included, cost the least.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best, begins = [(0, 0)], [0]  # for the first rows: cost and number of their groups, and where the last one begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        cost, count, begin = min(
            (cost + pass_tokens + (end - begin) * longest, count + 1, begin) for begin, (cost, count) in enumerate(best)
        )
        best.append((cost, count))
        begins.append(begin)
    groups, end = [], len(order)
    while end:
        groups.append(order[begins[end] : end])
        end = begins[end]
    return groups[::-1]


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
    config = model.config.get_text_config()
    as_one = may_replace_cache(config, input_ids.shape[1]) or counts_slots(config, generation_config.max_length)
    groups = None if as_one else groups_of(model, input_ids, model_kwargs)
    if groups is None:
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        return outputs[CACHE], outputs.logits[:, -1:]
    whole, length = model_kwargs[CACHE], input_ids.shape[1]
    by_row = {name: model_kwargs[name] for name in _BY_ROW if model_kwargs.get(name) is not None}
    empty, caches, logits, deep = deepcopy(whole), [], [], []
    for group in groups:
        cache, columns = deepcopy(empty), slice(length - group.length, None)
        own = {name: value[..., group.read, columns] for name, value in by_row.items()}
        kwargs = {**model_kwargs, **own, CACHE: cache}
        with run.reading_into(cache):
            outputs = model._prefill(input_ids[group.read, columns], generation_config, kwargs)
        caches.append(cache)
        logits.append(outputs.logits[group.own, -1:])
        if isinstance(run, BlockRun) and run.prev_hidden_state is not None:
            deep.append(run.prev_hidden_state[group.own])
    _fill(whole, caches, groups, length)
    order = torch.tensor([row for group in groups for row in group.rows]).argsort().tolist()
    if isinstance(run, BlockRun):
        run.prev_hidden_state = torch.cat(deep)[order]
    return whole, torch.cat(logits)[order]


def groups_of(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[Group] | None:
    """How the prompts of a call are best read; `None` for all of them as they are, in one pass.

    Args:
        model: The attached model.
        input_ids: (rows, length).
        model_kwargs: What `generate` prepared.
    """
    if len(input_ids) == 1 or not _can_be_read_apart(model, input_ids, model_kwargs):
        return None
    own = [value.movedim(-2, 0).flatten(1) for name in _BY_ROW if (value := model_kwargs.get(name)) is not None]
    first: dict[tuple[int, ...], int] = {}  # of the rows that are alike
    prompts = torch.cat([input_ids, *own], dim=1).tolist()
    firsts = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
    read, of_all = list(first.values()), _lengths(model, input_ids, model_kwargs)
    lengths = [of_all[row] for row in read]
    groups = groups_by_length(lengths, PASS_TOKENS)
    if len(read) == len(input_ids) and len(groups) == 1:
        return None
    return [_group([read[place] for place in group], firsts, lengths[group[-1]]) for group in groups]


def _group(read: list[int], firsts: list[int], length: int) -> Group:
    rows = [row for row, first in enumerate(firsts) if first in read]
    return Group(read, rows, [read.index(firsts[row]) for row in rows], length)


def _lengths(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """The rows' tokens, without padding where it is known to pay to leave that out."""
    rows, length = input_ids.shape
    if (
        input_ids.device.type != "cpu"
        or any(model_kwargs.get(name) is None for name in _BY_ROW)
        or any(limit < length for limit in rope_limits(model.config.get_text_config()).values())
        or getattr(model, "is_quantized", False)  # a pass then costs more than reading weights does
        or set((getattr(model, "hf_device_map", None) or {"": "cpu"}).values()) != {"cpu"}  # or than this, offloaded
    ):
        return [length] * rows
    mask = model_kwargs["attention_mask"].long()
    lengths = mask.sum(dim=1)
    is_left_padded = torch.equal(mask, (torch.arange(length) >= length - lengths[:, None]).long())
    return lengths.tolist() if is_left_padded and lengths.min() > 0 else [length] * rows


def _can_be_read_apart(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether nothing but tokens, mask and positions tells the rows of a batch from each other."""
    cache: Any = model_kwargs.get(CACHE)
    by_row = [model_kwargs.get(name) for name in _BY_ROW]
    others = [value for name, value in model_kwargs.items() if name not in _BY_ROW and value is not cache]
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and cache.get_seq_length() == 0
        and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        and all(value is None or value.shape[-2:] == input_ids.shape for value in by_row)
        and all(isinstance(value, _SHARED) or is_absent(value) for value in others)
        and not has_adapters_by_row(model, model._tide.structure)
    )


def _fill(whole: Cache, caches: list[DynamicCache], groups: list[Group], length: int) -> None:
    """Store the K/V of all groups, with zeros for the padding in front."""
    for number in range(len(caches[0].layers)):
        parts: list[Any] = [cache.layers[number] for cache in caches]
        if parts[0].is_initialized:
            keys, values = (_laid_out([getattr(part, name) for part in parts], groups, length) for name in _STORED)
            whole.update(keys, values, number)
            for part in parts:
                part.keys = part.values = None  # gives back the memory


def _laid_out(parts: list[Tensor], groups: list[Group], length: int) -> Tensor:
    """(rows, heads, length, D) of the groups' (read, heads, up to length, D), which all end at the last token."""
    _, heads, _, size = parts[0].shape
    laid_out = parts[0].new_zeros((sum(len(group.rows) for group in groups), heads, length, size))
    for part, group in zip(parts, groups, strict=True):
        laid_out[group.rows, :, length - part.shape[2] :] = part[group.own]
    return laid_out
