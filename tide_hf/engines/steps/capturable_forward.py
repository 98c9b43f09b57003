"""What a model's forward does otherwise while a step of it is captured: nothing that needs the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from ..gqa_attention import attend_grouped, is_plain_attention, sdpa_configs, set_attention
from .step_buffers import WIDEST

NAME = "tide_gqa_capturable"

# Before, it made a tensor of a number that the host had, each time; a capture allows no such copy.
HAS_CAPTURABLE_MASKS = Version(transformers.__version__) >= Version("5.22")


@contextmanager
def capturable_forward(model: Any, tokens: int) -> Iterator[None]:
    """Have a model run so that it can be captured, with the same results but for rounding.

    Where it attends by `sdpa`, query heads that share K/V read them where they are, since a step always has a mask,
    under which `sdpa` copies all slots for each of these heads.

    Experts then run as `generate` has them run on GPUs when it decodes, with a copy of their weights for each token.
    For more tokens than a single row's widest pass has, that is done only where their other way needs the host, as
    grouped products do outside bfloat16.

    Args:
        model: The model.
        tokens: Of the step, all rows together.
    """
    with ExitStack() as changes:
        if not HAS_CAPTURABLE_MASKS:
            changes.enter_context(_masks_made_on_the_device())
        if tokens <= WIDEST or model.dtype != torch.bfloat16:
            changes.enter_context(model._optimize_model_for_decode())
        if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
            changes.enter_context(_grouped_heads(model))
        yield


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What `sdpa_attention_forward` does, without copies of K/V that heads share; Dynamo can trace it."""
    if attention_mask is not None and is_plain_attention(kwargs):
        found = attend_grouped(query, key, value, attention_mask, kwargs.get("scaling"))
        if found is not None:
            return found, None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def eager_mask(*, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """What transformers' function of this name returns; all of it is made on the device."""
    may_attend = sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})
    if may_attend is None:
        return None
    return torch.where(may_attend, may_attend.new_zeros((), dtype=dtype), torch.finfo(dtype).min)


@contextmanager
def _grouped_heads(model: Any) -> Iterator[None]:
    configs = sdpa_configs(model)
    set_attention(configs, NAME)
    try:
        yield
    finally:
        set_attention(configs, "sdpa")


@contextmanager
def _masks_made_on_the_device() -> Iterator[None]:
    """Have masks of eager attention made by [`eager_mask`], another thread's as well."""
    before = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = eager_mask
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS["eager"] = before


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
