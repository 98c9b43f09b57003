"""Checks that multi-token passes, such as verify passes, give the logits of token-by-token decoding."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..base_model.parity import check_parity, probe, probe_tokens, uses_slot_positions
from ..base_model.structure import DecoderStructure, input_device, last_position, rope_limits
from ..common.errors import UnsupportedModelError, UnsupportedOptionError
from .kv_cache import crop_layers, start_recording
from .masks import TREE_ATTENTION, PassTree, reading_tree

# Config fields that make windows in any model's cache, and what a model's code calls to have them in its masks as well.
WINDOWS = {"sliding_window": "create_sliding_window_causal_mask", "attention_chunk_size": "create_chunked_causal_mask"}
ANY_MASK = "create_masks_for_generate"
SPARSE_ATTENTION = ("index_topk", "keep_window_size")  # config fields: maximum number of keys that a token selects

PROBE_LENGTH = 8
VERIFY_WIDTH = 4  # tokens of the probe in one pass over the cache
SMALL_LIMIT = 64  # tokens; probing beyond a larger limit would take too long
# Matches config fields that limit attention: to a window, a chunk, or a number of keys or blocks.
LIMIT_NAMES = re.compile("window|chunk|block|top_?k")

logger = logging.getLogger(__name__)


def multi_token_limit(model: PreTrainedModel) -> tuple[str, int] | None:
    """Find the length up to which a multi-token pass attends to the same keys as token-by-token decoding, if limited.

    Beyond a window that only the cache enforces (Moshi, or a Llama whose config names one), a multi-token pass attends
    to more keys. Where a token selects its top-k keys (DeepSeek Sparse Attention, Doge), the shape of the pass decides
    ties. Returns the limit's field in the text config and its value, or `None`.
    """
    config = model.config.get_text_config()
    names = [*SPARSE_ATTENTION, *(name for name in WINDOWS if _only_cache_has(name, model, config))]
    limits = {name: limit for name in names if (limit := getattr(config, name, None)) is not None}
    return min(limits.items(), key=lambda item: item[1], default=None)


def _only_cache_has(window: str, model: PreTrainedModel, config: Any) -> bool:
    """Whether the cache has a window that the model's masks ignore; a field of the config alone may mean neither."""
    if getattr(config, window, None) is None or not any(DynamicCache(config=config).is_sliding):
        return False
    parts = [type(part) for part in model.modules() if isinstance(part, PreTrainedModel)]
    modules = {sys.modules.get(part.forward.__module__) for part in parts}
    return not any(hasattr(module, name) for module in modules for name in (WINDOWS[window], ANY_MASK))


def check_multi_token_passes(model: PreTrainedModel, num_slots: int) -> None:
    """Raise if `num_slots`, the tokens of prompt and answer including padding, exceeds `multi_token_limit`."""
    found, kind = multi_token_limit(model), model.config.get_text_config().model_type
    if found is not None and num_slots > found[1]:
        raise UnsupportedOptionError(
            f"a pass of {kind} over several tokens attends to other keys than token by token",
            got=f"{num_slots} tokens of prompt and answer",
            expected=f"at most {found[1]}, its {found[0]}",
            do="Pass less of them, choose another tide_mode, or detach TIDE for this call.",
        )


class WidePasses(NamedTuple):
    """What a model's passes over several tokens allow.

    Attributes:
        need_same_length: Whether all rows must have one length, since the model may take slots for positions, those of
            rejected drafts included: its layout is not known, or it is passed no positions.
        take_trees: Whether a pass over a tree of tokens gives the logits of its paths.
    """

    need_same_length: bool = False
    take_trees: bool = False


def check_widths(model: PreTrainedModel, structure: DecoderStructure, needs_logits: bool = True) -> WidePasses:
    """Run `check_parity` on a tiny probe; check that the model's logits do not depend on the width of a pass.

    The probe runs in one pass; then a few tokens run again over the cache, in one pass and one by one. Models with a
    recurrent state, which never verify drafts, run only the first pass. In reduced precision, rounding may route a
    token to another expert, so it is enough if the multi-token pass's median token and one single token agree.

    Args:
        model: The base model.
        structure: Its parts.
        needs_logits: Whether logits must be reproduced from hidden states. Drafts of n-grams do without.
    """
    if structure.is_recurrent:
        check_parity(model, structure)
        return WidePasses()
    length, cache = _probe_length(model), _recording_cache(model)
    start = max(1, length - 2 * VERIFY_WIDTH)
    end = min(start + VERIFY_WIDTH, length)
    try:
        expected = check_parity(model, structure, length, cache)
    except UnsupportedModelError as error:
        if needs_logits:
            raise
        logger.info("n-grams alone can draft, since %s", error.problem)
        cache = _recording_cache(model)
        expected = probe(model, structure, 0, length, cache)
    is_exact = model.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    is_exact = is_exact and not getattr(model, "is_quantized", False)
    tolerance = 0.01 if is_exact else 0.25

    def difference(logits: Tensor, others: Tensor) -> float:
        differences = _differences(logits, others)
        return float(differences.max() if is_exact else differences.median())

    crop_layers(cache.layers, length - start)
    wide = probe(model, structure, start, end, cache)
    needs_same_length = not structure.is_known or uses_slot_positions(model, structure, end, cache)
    crop_layers(cache.layers, end - start)
    from_prefill = difference(wide, expected[start:end])
    is_causal = from_prefill <= tolerance
    if not is_causal:  # a prompt may attend to its later tokens (PaliGemma): then each single token is compared
        alone = probe(model, structure, 0, 1, None)
        if difference(alone, expected[:1]) <= tolerance:
            _check_difference(model, from_prefill, tolerance, length)
    singles: list[float] = []
    for position in range(start, end):
        single = probe(model, structure, position, position + 1, cache)
        singles.append(difference(single, wide[position - start][None]))
        if is_causal and (is_exact or singles[-1] <= tolerance):
            break
    decides = torch.max if is_exact else torch.min if is_causal else torch.median
    _check_difference(model, float(decides(torch.tensor(singles))), tolerance, length)
    crop_layers(cache.layers, len(singles))
    found = None if needs_same_length else _along_path(model, structure, start, cache)
    return WidePasses(needs_same_length, found is not None and difference(found, wide[: len(found)]) <= tolerance)


# Of a probe: tokens `start`, `start + 1` and `start + 2`, with others beside and between them.
TREE_PARENTS = (-1, 0, 0, 2, 2, 1)
TREE_PATH = (0, 2, 4)


def _along_path(model: PreTrainedModel, structure: DecoderStructure, start: int, cache: Any) -> Tensor | None:
    """Logits along the path of a tree after the `start` tokens of a cache; `None` if its masks cannot be given."""
    if model.config.get_text_config()._attn_implementation not in TREE_ATTENTION:
        return None
    tree = PassTree.of([TREE_PARENTS], input_device(model))
    positions = start + tree.depths[0]
    tokens = positions.clone()
    beside = [node for node in range(len(TREE_PARENTS)) if node not in TREE_PATH]
    tokens[beside] += 1 + tokens[beside]
    try:
        with reading_tree(tree):
            return probe_tokens(model, structure, tokens, positions, start + len(tokens), cache)[list(TREE_PATH)]
    except UnsupportedModelError:  # of a model that makes its masks from positions
        return None


def _recording_cache(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    start_recording(cache)
    return cache


def _probe_length(model: PreTrainedModel) -> int:
    """The length of a probe: above small attention limits, but within the limits beyond which calls are refused."""
    config = model.config.get_text_config()
    named = [value for name, value in vars(config).items() if LIMIT_NAMES.search(name) and type(value) is int]
    length = max(PROBE_LENGTH, *(2 * VERIFY_WIDTH + value for value in named if value <= SMALL_LIMIT), 0)
    refused = multi_token_limit(model)
    limits = (*rope_limits(config).values(), last_position(config), refused and refused[1])
    return min(length, *(limit for limit in limits if limit), length)


def _differences(logits: Tensor, expected: Tensor) -> Tensor:
    """Distance of logits (..., vocabulary) from `expected`, relative to the norm of `expected` around its mean."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return (logits - expected).norm(dim=-1) / spread.clamp_min(torch.finfo(spread.dtype).tiny)


def _check_difference(model: PreTrainedModel, difference: float, tolerance: float, length: int) -> None:
    if not difference <= tolerance:  # true for NaN, too
        raise UnsupportedModelError(
            f"{type(model).__name__} has other logits in a pass over several tokens than token by token",
            got=f"a difference of {difference:.2f} times the spread of the logits, within {length} tokens",
            expected=f"at most {tolerance}",
            do="Decode by transformers alone, or teach tide_hf its limit, as CONTRIBUTING.md describes.",
        )
