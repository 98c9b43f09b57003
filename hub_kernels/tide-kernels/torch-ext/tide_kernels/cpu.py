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


def _best(input: Tensor, count: int, with_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    values = input.new_empty((*input.shape[:-1], count), dtype=torch.float32)
    sums = values.new_empty((*input.shape[:-1], 1) if with_sums else 0)
    return values, torch.empty_like(values, dtype=torch.int64), sums


_FAKES: dict[str, Callable[..., Any]] = {
    "skinny_gemm": lambda input, weights, *_: _product(input, sum(map(_size_out, weights))),
    "decode_attention": lambda query, *_: query.new_empty(query.shape),
    "prefill_attention": lambda query, *_: query.new_empty(query.transpose(1, 2).shape),
    "decoder_layers": lambda hidden_states, *_: hidden_states.new_empty(hidden_states.shape),
    "are_samples": lambda *_: True,
    "top_tokens": _best,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(add_op_namespace_prefix(_name), _fake, allow_override=True)

skinny_gemm: Any = ops.skinny_gemm.default
decode_attention: Any = ops.decode_attention.default
prefill_attention: Any = ops.prefill_attention.default
decoder_layers: Any = ops.decoder_layers.default
are_samples: Any = ops.are_samples.default
top_tokens: Any = ops.top_tokens.default


def implementations() -> dict[str, str]:
    """What runs, by op: `"cpu"`."""
    return dict.fromkeys(_FAKES, "cpu")
