"""Prefill: K/V of a shared prefix are reused, and the prompts of a batch run in groups of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..base_model.inputs import is_absent
from ..base_model.structure import CACHE, may_replace_cache, rope_limits, uses_slot_positions
from ..base_model.wrappers import has_adapters_by_row
from ..depth.gates import LayerRun
from ..depth.head_drafting import HeadRun
from ..depth.kv_cache import crop_layers
from .drafts import num_shared

# On a CPU one more pass costs as much as this many tokens, since each pass reads all weights. A GPU processes thousands
# of tokens while it reads the weights, so there the whole batch is one pass.
PASS_TOKENS = 40
_INPUTS_BY_ROW = ("attention_mask", "position_ids")
_SHARED = (bool, int, float, str, type(None))  # types of model inputs that are the same for all rows


class PrefixCache:
    """The K/V cache of the last single-sequence call, reused for a prompt that begins with the same tokens."""

    def __init__(self, config: Any) -> None:
        self.config = config.get_text_config(decoder=True)
        self._tokens: list[int] = []
        self._cache: DynamicCache | None = None

    def take(self, prompt: Sequence[int]) -> DynamicCache:
        """Return a cache, possibly empty, with the K/V of the longest stored prefix of `prompt[:-1]`.

        The call may write to the cache. After success, pass the cache to [`PrefixCache.store`]; else drop it.
        """
        shared = num_shared(self._tokens, prompt[:-1])
        surplus = len(self._tokens) - shared
        cache, self._cache, self._tokens = self._cache, None, []
        # Beyond a RoPE limit, rotary angles depend on the length, so K/V of another text cannot be reused.
        rope_changes = any(limit < len(prompt) for limit in rope_limits(self.config).values())
        if cache is None or shared == 0 or rope_changes:
            return DynamicCache(config=self.config)
        if surplus and any(type(layer) is not DynamicLayer for layer in cache.layers):
            return DynamicCache(config=self.config)  # a sliding window cannot be cropped
        if surplus:
            crop_layers(cache.layers, surplus)
        return cache

    def store(self, cache: DynamicCache, tokens: Sequence[int]) -> None:
        """Store a call's cache for the next call; `tokens` are prompt and answer; the last token may have no K/V."""
        self._cache, self._tokens = cache, list(tokens)[: cache.get_seq_length()]


@dataclass(frozen=True)
class Group:
    """Rows of a batch whose prompts are prefilled in one pass."""

    distinct: list[int]  # rows that the pass runs, with different prompts
    rows: list[int]  # rows that get K/V of this pass: `distinct`, and rows with equal prompts
    index: list[int]  # for each of `rows` the index of its prompt in `distinct`
    length: int  # tokens of the longest prompt, to which the others are padded


def groups_by_length(lengths: Sequence[int], pass_tokens: int) -> list[list[int]]:
    """Group rows by length, at the least total cost: `pass_tokens` per pass, and one per token, padding included."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best, begins = [(0, 0)], [0]  # for the n shortest rows: (cost, number of groups); start of the last group
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


def prefill(
    model: Any, run: LayerRun, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> tuple[Cache, Tensor]:
    """Run the prompts of a call; return its cache, and (rows, 1, vocabulary) logits of the last prompt tokens."""
    config = model.config.get_text_config()
    as_one = may_replace_cache(config, input_ids.shape[1]) or uses_slot_positions(config, generation_config.max_length)
    groups = None if as_one else groups_of(model, input_ids, model_kwargs)
    if groups is None:
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        return outputs[CACHE], outputs.logits[:, -1:]
    whole, length = model_kwargs[CACHE], input_ids.shape[1]
    by_row = {name: model_kwargs[name] for name in _INPUTS_BY_ROW if model_kwargs.get(name) is not None}
    empty, caches, logits, prev_hidden_states = deepcopy(whole), [], [], []
    for group in groups:
        cache, columns = deepcopy(empty), slice(length - group.length, None)
        own = {name: value[..., group.distinct, columns] for name, value in by_row.items()}
        kwargs = {**model_kwargs, **own, CACHE: cache}
        with run.prefilling(cache):
            outputs = model._prefill(input_ids[group.distinct, columns], generation_config, kwargs)
        caches.append(cache)
        logits.append(outputs.logits[group.index, -1:])
        if isinstance(run, HeadRun) and run.prev_hidden_state is not None:
            prev_hidden_states.append(run.prev_hidden_state[group.index])
    _fill(whole, caches, groups, length)
    order = torch.tensor([row for group in groups for row in group.rows]).argsort().tolist()
    if isinstance(run, HeadRun):
        run.prev_hidden_state = torch.cat(prev_hidden_states)[order]
    return whole, torch.cat(logits)[order]


def groups_of(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[Group] | None:
    """The cheapest groups for the prompts of a call, (rows, length); `None` for one pass over all rows."""
    if len(input_ids) == 1 or not _can_be_split(model, input_ids, model_kwargs):
        return None
    own = [value.movedim(-2, 0).flatten(1) for name in _INPUTS_BY_ROW if (value := model_kwargs.get(name)) is not None]
    first: dict[tuple[int, ...], int] = {}  # the first row with each prompt
    prompts = torch.cat([input_ids, *own], dim=1).tolist()
    firsts = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
    distinct, all_lengths = list(first.values()), _lengths(model, input_ids, model_kwargs)
    lengths = [all_lengths[row] for row in distinct]
    groups = groups_by_length(lengths, PASS_TOKENS)
    if len(distinct) == len(input_ids) and len(groups) == 1:
        return None
    return [_group([distinct[index] for index in group], firsts, lengths[group[-1]]) for group in groups]


def _group(distinct: list[int], firsts: list[int], length: int) -> Group:
    rows = [row for row, first in enumerate(firsts) if first in distinct]
    return Group(distinct, rows, [distinct.index(firsts[row]) for row in rows], length)


def _lengths(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Each row's length, without left padding if shorter passes are known to be cheaper than one padded pass."""
    rows, length = input_ids.shape
    if (
        input_ids.device.type != "cpu"
        or any(model_kwargs.get(name) is None for name in _INPUTS_BY_ROW)
        or any(limit < length for limit in rope_limits(model.config.get_text_config()).values())
        or getattr(model, "is_quantized", False)  # each extra pass would also dequantise the weights
        or set((getattr(model, "hf_device_map", None) or {"": "cpu"}).values()) != {"cpu"}  # or load offloaded weights
    ):
        return [length] * rows
    mask = model_kwargs["attention_mask"].long()
    lengths = mask.sum(dim=1)
    is_left_padded = torch.equal(mask, (torch.arange(length) >= length - lengths[:, None]).long())
    return lengths.tolist() if is_left_padded and lengths.min() > 0 else [length] * rows


def _can_be_split(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether the rows of a batch differ in nothing but tokens, mask and positions."""
    cache: Any = model_kwargs.get(CACHE)
    by_row = [model_kwargs.get(name) for name in _INPUTS_BY_ROW]
    others = [value for name, value in model_kwargs.items() if name not in _INPUTS_BY_ROW and value is not cache]
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
    """Store the K/V of all groups in `whole`, with zeros for the left padding."""
    for layer_idx in range(len(caches[0].layers)):
        layers: list[Any] = [cache.layers[layer_idx] for cache in caches]
        if layers[0].is_initialized:
            keys = _padded([layer.keys for layer in layers], groups, length)
            values = _padded([layer.values for layer in layers], groups, length)
            whole.update(keys, values, layer_idx)
            for layer in layers:
                layer.keys = layer.values = None  # frees the memory


def _padded(states: list[Tensor], groups: list[Group], length: int) -> Tensor:
    """Left-pad the groups' states, (distinct, heads, up to length, D), and join them to (rows, heads, length, D)."""
    _, heads, _, size = states[0].shape
    padded = states[0].new_zeros((sum(len(group.rows) for group in groups), heads, length, size))
    for state, group in zip(states, groups, strict=True):
        padded[group.rows, :, length - state.shape[2] :] = state[group.index]
    return padded
