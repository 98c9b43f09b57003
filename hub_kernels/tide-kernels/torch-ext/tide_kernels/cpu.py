"""The ops for CPUs, in C++ (`tide_kernels_cpu/binding.cpp` says what they take), and their fake implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops


def _product(input: Tensor, size_out: int) -> Tensor:
    return input.new_empty((*input.shape[:-1], size_out))


def _heads(hidden_states: Tensor, weights: list[Tensor], head_size: int) -> Tensor:
    heads = sum(weight.shape[0] for weight in weights) // head_size
    return hidden_states.new_empty((hidden_states.shape[0], heads, hidden_states.shape[1], head_size))


_FAKES: dict[str, Callable[..., Tensor]] = {
    "skinny_gemm": lambda input, weights, *_: _product(input, sum(weight.shape[0] for weight in weights)),
    "groupwise_gemm": lambda input, weight, *_: _product(input, weight.shape[0]),
    "decode_attention": lambda query, *_: query.new_empty(query.shape),
    "prefill_attention": lambda query, *_: query.new_empty(query.transpose(1, 2).shape),
    "qkv_rope": lambda hidden_states, norm, eps, weights, *rest: _heads(hidden_states, weights, rest[-1].shape[-1]),
    "attention_mlp": lambda hidden_states, *_: hidden_states.new_empty(hidden_states.shape),
    "decoder_layer": lambda hidden_states, *_: hidden_states.new_empty(hidden_states.shape),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(add_op_namespace_prefix(_name), _fake, allow_override=True)

skinny_gemm: Any = ops.skinny_gemm.default
groupwise_gemm: Any = ops.groupwise_gemm.default
decode_attention: Any = ops.decode_attention.default
prefill_attention: Any = ops.prefill_attention.default
qkv_rope: Any = ops.qkv_rope.default
attention_mlp: Any = ops.attention_mlp.default
decoder_layer: Any = ops.decoder_layer.default


def implementations() -> dict[str, str]:
    """What runs, by op: `"cpu"`."""
    return dict.fromkeys(_FAKES, "cpu")
