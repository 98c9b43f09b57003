"""Attention on CPUs in which query heads that share K/V read them where they are.

Where there is a mask, transformers' `sdpa` copies K/V for every query head that shares them, in every layer and step.
Over 96 rows that took longer than all products of matrices, and over K/V of a fixed size it copies all of them for each
token. Query heads may as well stand behind each other as further queries of one head, under the same mask. Of K/V of a
fixed size those slots that nothing was written to yet can be left out, where it is said how many are filled. Many
queries, and few over filled slots, have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..kernels.cpu.decode_attention import decode_sdpa
from ..kernels.cpu.prefill_attention import prefill_sdpa
from ..routers.block_head import BlockHead

NAME = "tide_shared_heads"
UNUSUAL = ("position_bias", "softcap", "cache", "s_aux")  # what changes the scores, or where K/V are

_changing = Lock()
# Calls, of several threads, that need it now, and the configs that were changed for them.
_users: WeakKeyDictionary[PreTrainedModel, tuple[int, list[Any]]] = WeakKeyDictionary()
_filled: ContextVar[Tensor | None] = ContextVar("filled", default=None)
_may_use_kernels: ContextVar[bool] = ContextVar("may_use_kernels", default=True)  # in a pass over many queries


@contextmanager
def filled_up_to(end: Tensor) -> Iterator[None]:
    """Let attention by [`attend`] read no slots from `end` on, () int64 on the CPU; its mask has to hide them."""
    token = _filled.set(end)
    try:
        yield
    finally:
        _filled.reset(token)


@contextmanager
def shared_heads(
    model: PreTrainedModel, block: BlockHead | None = None, may_use_kernels: bool = True
) -> Iterator[None]:
    """Let a model on a CPU that attends by `sdpa` attend in this way, until the last of those that ask for it has done.

    Args:
        model: Any model; one that attends otherwise, or knows no other ways to, stays as it is.
        block: A block that runs with it, if any.
        may_use_kernels: Whether many queries may have a kernel of their own.
    """
    is_sdpa = model.config._attn_implementation in ("sdpa", NAME) and model._can_set_attn_implementation()
    if model.device.type != "cpu" or not is_sdpa:
        yield
        return
    with _changing:
        users, configs = _users.get(model) or (0, sdpa_configs(model))
        _users[model] = users + 1, configs
    token = _may_use_kernels.set(may_use_kernels)
    try:
        _set(model, block, configs, NAME)
        yield
    finally:
        _may_use_kernels.reset(token)
        with _changing:
            users, configs = _users.pop(model)
            if users > 1:
                _users[model] = users - 1, configs
            else:
                _set(model, block, configs, "sdpa")


def sdpa_configs(model: PreTrainedModel) -> list[Any]:
    """The configs of those parts of a model that attend by `sdpa` and can attend by another function.

    Others stay as they are: an encoder that knows `eager` attention alone raises where it is told of another.
    """
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    configs = [part.config for part in parts if part._can_set_attn_implementation()]
    return [config for config in configs if config._attn_implementation == "sdpa"]


def set_attention(configs: list[Any], name: str) -> None:
    """Have the parts of a model with these configs attend by the function that is registered as `name`."""
    for config in configs:
        config._attn_implementation = {"": name}  # its own alone, not that of the configs in it


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What `sdpa_attention_forward` does, in a form that suits many queries, or few under a mask.

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
    found = None
    # Dynamo cannot read context variables: it may trace layers of this model in another thread's call.
    if is_usual(kwargs) and not torch.compiler.is_dynamo_compiling():
        scale, end, is_masked = kwargs.get("scaling"), _filled.get(), attention_mask is not None
        may_be_many = end is None and _may_use_kernels.get() and (is_masked or _sees_back(module, kwargs))
        if may_be_many and not _is_watched(query, key, value):
            found = prefill_sdpa(query, key, value, attention_mask, scale)
        if found is None and attention_mask is not None:
            found = attend_joined(query, key, value, attention_mask, scale, end)
    if found is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return found, None


def is_usual(kwargs: dict[str, Any]) -> bool:
    """Whether nothing that an attention function is called with changes its scores, or where K/V are."""
    return not any(kwargs.get(name) is not None for name in UNUSUAL) and not kwargs.get("dropout")


def _is_watched(*tensors: Tensor) -> bool:
    """Whether somebody looks at every operation, or asks of it what a kernel lacks: gradients, other dtypes."""
    is_looked_at = is_in_torch_dispatch_mode(include_infra_modes=False)  # traces may see kernels
    has_gradients = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    return is_looked_at or has_gradients or torch.is_autocast_enabled("cpu")


def _sees_back(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether without a mask a token sees those before it alone."""
    is_causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def attend_joined(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, end: Tensor | None = None
) -> Tensor | None:
    """With query heads that share K/V behind each other, as queries of one head; `None` where that has no gain.

    Args:
        query: (rows, heads, width, head_size).
        key: (rows, shared heads, slots, head_size).
        value: Shaped as `key`.
        mask: (rows, 1, width, slots).
        scale: Of the scores; `None` is the usual one.
        end: () int64 on the CPU, the slots that are filled, if the others are to be left out.

    Returns:
        (rows, width, heads, head_size).
    """
    rows, heads, width, size = query.shape
    shared = key.shape[1]
    group = heads // shared
    is_usual = mask.shape[1] == 1 and key.shape == value.shape
    is_narrow = group * width <= 2 * heads * size  # it is the mask that is copied: no more of it than of K/V
    has_gain = end is not None or group > 1
    if not (has_gain and is_usual and is_narrow):
        return None
    joined = query.reshape(rows, shared, group * width, size)
    output = _attended(joined, key, value, mask.repeat(1, 1, group, 1), end, scale)
    return output.reshape(rows, heads, width, size).transpose(1, 2).contiguous()


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, end: Tensor | None, scale: float | None
) -> Tensor:
    if end is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    if mask.dtype is torch.bool:  # or each call would make it into numbers once more
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    found = decode_sdpa(query, key, value, mask, end, scale)
    return torch.ops.tide_hf.attend_filled(query, key, value, mask, end, scale) if found is None else found


# An op, since how much of K/V it reads is known in each run alone.
_ops = torch.library.Library("tide_hf", "FRAGMENT")
_ops.define("attend_filled(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor end, float? scale) -> Tensor")


def _attend_filled(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, end: Tensor, scale: float | None) -> Tensor:
    slots = int(end)
    key, value, mask = key[:, :, :slots], value[:, :, :slots], mask[..., :slots]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).contiguous()


_ops.impl("attend_filled", _attend_filled, "CompositeExplicitAutograd")


@torch.library.register_fake("tide_hf::attend_filled", lib=_ops)
def _like_query(
    query: Tensor, _key: Tensor, _value: Tensor, _mask: Tensor, _end: Tensor, _scale: float | None
) -> Tensor:
    return query.new_empty(query.shape)


def _set(model: PreTrainedModel, block: BlockHead | None, configs: list[Any], name: str) -> None:
    set_attention(configs, name)
    if block is not None:
        block.use_attention_of(model.config.get_text_config())


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
