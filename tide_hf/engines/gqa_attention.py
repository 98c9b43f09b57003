"""Attention that does not repeat the K/V of grouped query heads (GQA), on CPUs and in steps captured as CUDA graphs.

With a mask, transformers' `sdpa` repeats K/V for every query head of a group, in every layer and step. For 96 rows
these copies took longer than all matrix products, and with a static cache unfilled slots are copied too. Here, the
query heads of a group are stacked as further queries of one head, with the same mask. On CPUs, unfilled slots of a
static cache are skipped, and there are kernels for prefill and for decode over a static cache.
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

from ..depth.masks import by_tokens
from ..kernels.cpu.attention import decode_sdpa, prefill_sdpa
from ..kernels.flash_decode import flash_decode
from ..routers import draft_head

NAME = "tide_gqa"
OTHER_SEMANTICS = ("position_bias", "softcap", "cache", "s_aux")  # arguments that change scores, or where K/V are

_changing = Lock()
# For each model: the number of open `gqa_attention` contexts in all threads, and the configs that they changed.
_users: WeakKeyDictionary[PreTrainedModel, tuple[int, list[Any]]] = WeakKeyDictionary()
_num_filled: ContextVar[Tensor | None] = ContextVar("num_filled", default=None)
# The same on a GPU, in steps whose masks hide no more than unfilled slots and later tokens.
_end_on_device: ContextVar[Tensor | None] = ContextVar("end_on_device", default=None)
_reads_lengths: ContextVar[bool] = ContextVar("reads_lengths", default=False)
_may_use_kernels: ContextVar[bool] = ContextVar("may_use_kernels", default=True)  # in prefill

_is_decode: ContextVar[bool] = ContextVar("is_decode", default=False)


@contextmanager
def filled_up_to(end: Tensor) -> Iterator[None]:
    """Let [`attend`] read only the slots before `end`, see `CachePosition`; the mask has to hide all other slots.

    On a GPU, `attend` reads all slots but within [`reading_lengths`], since the host does not know `end`.
    """
    known, unknown = (end, None) if end.device.type == "cpu" else (None, end if _reads_lengths.get() else None)
    tokens = _num_filled.set(known), _end_on_device.set(unknown)
    try:
        yield
    finally:
        _num_filled.reset(tokens[0])
        _end_on_device.reset(tokens[1])


@contextmanager
def reading_lengths(may_read: bool) -> Iterator[None]:
    """Context in which [`attend`] reads the number of filled slots on the device, if `may_read`, and no mask.

    For one row, of which masks hide nothing but unfilled slots and later tokens.
    """
    token = _reads_lengths.set(may_read)
    try:
        yield
    finally:
        _reads_lengths.reset(token)


def is_replaced(model: PreTrainedModel) -> bool:
    """Whether [`attend`] is a model's attention within [`gqa_attention`]."""
    return _can_change(model) and attention_of(model.config.get_text_config()) == "sdpa"


def can_skip_rejected(model: PreTrainedModel) -> bool:
    """Whether transformers makes the masks for this attention, which then skip what `masks.skipping_rejected` names."""
    # Other code may make masks by itself.
    return is_replaced(model) and type(model).__module__.startswith("transformers.")


@contextmanager
def gqa_attention(
    model: PreTrainedModel,
    *,
    may_use_kernels: bool = True,
    cpu_only: bool = True,
    is_decode: bool = False,
) -> Iterator[None]:
    """Context in which a model uses this attention instead of `sdpa`; concurrent contexts on one model are allowed.

    The model stays unchanged if its attention is not `sdpa` or cannot be changed, or, with `cpu_only`, if the model is
    not on a CPU. `may_use_kernels` lets prefill use the compiled kernel. With `is_decode` all passes use the kernel for
    decode, whose sums do not depend on their width.
    """
    if not _can_change(model) or (cpu_only and model.device.type != "cpu"):
        yield
        return
    with _changing:
        users, configs = _users.get(model) or (0, _sdpa_configs(model))
        _users[model] = users + 1, configs
    token, of_decode = _may_use_kernels.set(may_use_kernels), _is_decode.set(is_decode)
    try:
        _set(configs, NAME)
        yield
    finally:
        _is_decode.reset(of_decode)
        _may_use_kernels.reset(token)
        with _changing:
            users, configs = _users.pop(model)
            if users > 1:
                _users[model] = users - 1, configs
            else:
                _set(configs, "sdpa")


def _can_change(model: PreTrainedModel) -> bool:
    """Whether a model's attention is `sdpa` and can be changed."""
    return attention_of(model.config) == "sdpa" and model._can_set_attn_implementation()


def attention_of(config: Any) -> str:
    """The model's own attention implementation, whatever a call in another thread uses meanwhile."""
    found = config._attn_implementation
    return "sdpa" if found == NAME else found


def _sdpa_configs(model: PreTrainedModel) -> list[Any]:
    """The configs of the submodels that use `sdpa` attention and support other implementations.

    Other submodels are left out: changing an encoder that supports only `eager` attention would raise.
    """
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    configs = [part.config for part in parts if part._can_set_attn_implementation()]
    return [config for config in configs if config._attn_implementation == "sdpa"]


def _set(configs: list[Any], name: str) -> None:
    for config in configs:
        config._attn_implementation = {"": name}  # this config alone, not its sub-configs


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Drop-in replacement for `sdpa_attention_forward`, without repeated K/V."""
    found = None
    is_plain = not any(kwargs.get(name) is not None for name in OTHER_SEMANTICS) and not kwargs.get("dropout")
    if is_plain and not torch.compiler.is_dynamo_compiling():  # Dynamo cannot read context variables
        scale, end = kwargs.get("scaling"), _num_filled.get()
        if end is None and _is_decode.get() and not _needs_pytorch(query, key, value):
            end = torch.tensor(key.shape[2])
            if attention_mask is None and query.shape[2] == 1:
                attention_mask = query.new_zeros(1, 1, 1, key.shape[2])
        is_masked = attention_mask is not None
        may_prefill = end is None and _may_use_kernels.get() and (is_masked or _is_causal(module, kwargs))
        if may_prefill and not _needs_pytorch(query, key, value):
            found = prefill_sdpa(query, key, value, attention_mask, scale)
        if found is None and attention_mask is not None:
            found = _attend_by_length(query, key, value, attention_mask, kwargs)
        if found is None and attention_mask is not None:
            found = attend_grouped(query, key, value, attention_mask, scale, end)
    if found is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return found, None


def attend_static(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of a draft step over a static cache, as [`draft_head.Attention`], within [`filled_up_to`]."""
    end = _end_on_device.get()
    if end is not None:  # of all filled slots but the first, whose token has no state of one before
        return flash_decode(query, key[:, :, 1:], value[:, :, 1:], end - 1, None)
    found = None if mask is None else attend_grouped(query, key, value, mask, None, _num_filled.get())
    return draft_head.attend(query, key, value, mask) if found is None else found


def _needs_pytorch(*tensors: Tensor) -> bool:
    """Whether a user's dispatch mode, gradients or autocast are active, which the kernels do not support."""
    has_mode = is_in_torch_dispatch_mode(include_infra_modes=False)  # not tracing modes, which the kernels support
    has_gradients = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    return has_mode or has_gradients or torch.is_autocast_enabled("cpu")


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether attention without a mask is causal."""
    is_causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def _attend_by_length(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """Attention that reads the number of filled slots on a GPU, within [`reading_lengths`]; `None` elsewhere."""
    end = _end_on_device.get()
    has_bias, has_window = mask.dtype is not torch.bool, bool(kwargs.get("sliding_window"))
    if end is None or has_bias or has_window or key.shape != value.shape:
        return None
    return flash_decode(query, key, value, end, kwargs.get("scaling"))


def attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, end: Tensor | None
) -> Tensor | None:
    """Attend with the query heads of a group stacked as queries of one head; return `None` if impossible or no faster.

    Queries are (rows, heads, width, head_size), K/V (rows, KV heads, slots, head_size), the mask is (rows, 1, width,
    slots), and the result (rows, width, heads, head_size). `end` is the number of filled slots; `None` to read all.
    """
    rows, heads, width, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    is_usual = mask.shape[1] == 1 and key.shape == value.shape
    is_narrow = group * width <= 2 * heads * size  # the repeated mask should be no larger than repeated K/V
    has_gain = end is not None or group > 1
    if not (has_gain and is_usual and is_narrow):
        return None
    query = query.reshape(rows, kv_heads, group * width, size)
    mask = mask.repeat(1, 1, group, 1)
    if end is None:
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    else:
        output = _attend_to_filled(query, key, value, mask, end, scale)
    return output.reshape(rows, heads, width, size).transpose(1, 2).contiguous()


def _attend_to_filled(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, end: Tensor, scale: float | None
) -> Tensor:
    if mask.dtype is torch.bool:  # the kernel takes an additive mask
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    found = decode_sdpa(query, key, value, mask, end, scale)
    return torch.ops.tide_hf.attend_filled(query, key, value, mask, end, scale) if found is None else found


# A custom op, so that traces do not depend on the number of filled slots, which differs from run to run.
_ops = torch.library.Library("tide_hf", "FRAGMENT")
_ops.define("attend_filled(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor end, float? scale) -> Tensor")


def _attend_filled(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, end: Tensor, scale: float | None) -> Tensor:
    slots = int(end)
    key, value, mask = key[:, :, :slots], value[:, :, :slots], mask[..., :slots]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).contiguous()


_ops.impl("attend_filled", _attend_filled, "CompositeExplicitAutograd")
torch.library.register_fake("tide_hf::attend_filled", lambda query, *_: query.new_empty(query.shape), lib=_ops)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, by_tokens(sdpa_mask))
