"""The ops for CPUs, in C++ (`tide_kernels_cpu/binding.cpp` says what they take), and their fake implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

PANEL_ROWS = 16  # of weights that are stored in panels, (out / 16, in / n, 16, n)


def _product(input: Tensor, size_out: int) -> Tensor:
    return input.new_empty((*input.shape[:-1], size_out))


def _size_out(weight: Tensor) -> int:
    return weight.shape[0] * (PANEL_ROWS if weight.dim() == 4 else 1)


_FAKES: dict[str, Callable[..., Tensor]] = {
    "skinny_gemm": lambda input, weights, *_: _product(input, sum(map(_size_out, weights))),
    "groupwise_gemm": lambda input, weight, *_: _product(input, weight.shape[0]),
    "decode_attention": lambda query, *_: query.new_empty(query.shape),
    "prefill_attention": lambda query, *_: query.new_empty(query.transpose(1, 2).shape),
    "decoder_layers": lambda hidden_states, *_: hidden_states.new_empty(hidden_states.shape),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(add_op_namespace_prefix(_name), _fake, allow_override=True)

skinny_gemm: Any = ops.skinny_gemm.default
groupwise_gemm: Any = ops.groupwise_gemm.default
decode_attention: Any = ops.decode_attention.default
prefill_attention: Any = ops.prefill_attention.default
decoder_layers: Any = ops.decoder_layers.default


def implementations() -> dict[str, str]:
    """What runs, by op: `"cpu"`."""
    return dict.fromkeys(_FAKES, "cpu")
