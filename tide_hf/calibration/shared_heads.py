"""Attention for writing text in large batches: query heads that share K/V read them where they are.

Where there is a mask, transformers' `sdpa` copies K/V for every query head that shares them, in every layer and step.
Over 96 rows that took longer than all products of matrices; query heads may as well stand behind each other as further
queries of one head, under the same mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "tide_shared_heads"
UNUSUAL = ("position_bias", "softcap", "cache", "s_aux")  # what changes the scores, or where K/V are


@contextmanager
def shared_heads(model: PreTrainedModel) -> Iterator[None]:
    """Let a model on a CPU that attends by `sdpa` attend in this way; restore it afterwards.

    Args:
        model: Any model; one that attends otherwise stays as it is.
    """
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What `sdpa_attention_forward` does, in a form that suits single queries under a mask.

    Args:
        module: The attention.
        query: (rows, heads, width, head_size).
        key: (rows, shared heads, slots, head_size).
        value: Shaped as `key`.
        attention_mask: (rows, 1, width, slots), if any.
        kwargs: As there.

    Returns:
        (rows, width, heads, head_size), and no weights.
    """
    rows, heads, width, size = query.shape
    group = heads // key.shape[1]
    is_usual = attention_mask is not None and attention_mask.shape[1] == 1 and key.shape == value.shape
    if width > 1 or group == 1 or not is_usual or any(kwargs.get(name) is not None for name in UNUSUAL):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    joined = query.reshape(rows, -1, group, size)
    mask: Any = attention_mask
    mask = mask.expand(-1, -1, group, -1)
    output = scaled_dot_product_attention(joined, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return output.reshape(rows, 1, heads, size), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
