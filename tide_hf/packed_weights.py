"""Weights of linear layers on a CPU in another form: oneDNN's own layout, or 8 bits. Ops that multiply by them.

PyTorch's linear hands weights to MKL, or in bfloat16 to oneDNN, as they are stored. From a few rows on either copies
them into a layout of its own at every call, which costs a verify pass once more what a token costs; and there are CPUs
on which MKL reads them slowly even for one row. Weights that were copied once and kept cost neither. For which numbers
of rows that pays on this machine is measured at first use. Results differ from the plain call's by rounding, as those
of passes of another width do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from .timing import least_seconds

PROBED_ROWS = (1, 4, 16, 64, 256)  # what holds for one of them holds up to the next
PROBED_SIZE, PROBED_WEIGHTS = 1024, 16  # together more than a core's caches
REPEATS = 2
SAMPLED_WEIGHTS = 64
LARGEST_INT8 = 127
INT8_BLOCK = 16  # PyTorch's product reads beyond the end of rows that are no multiple of it
SMALLEST_SCALE = 1e-30  # of a row of zeros


class PackedWeight:
    """A weight in oneDNN's layout, or the weights of layers that have one input, behind each other.

    Args:
        *weights: (out, in) each, which it keeps alive.
    """

    def __init__(self, *weights: Tensor) -> None:
        self.weights = weights
        self.versions, self.samples = [weight._version for weight in weights], [_sample(weight) for weight in weights]
        self._take(weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights]))

    def is_of(self, *weights: Tensor, sampled: bool = False) -> bool:
        """Whether it still is those weights; `sampled` looks at values, which `.data` can change without notice."""
        versions = [weight._version for weight in weights]
        if versions != self.versions or any(one is not other for one, other in zip(weights, self.weights, strict=True)):
            return False
        return not sampled or all(map(torch.equal, self.samples, map(_sample, weights)))

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        return torch.ops.mkldnn._linear_pointwise.default(input, self._packed, bias, "none", [], "")

    def _take(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight, None)


class Int8Weight(PackedWeight):
    """The same in 8 bits, each row of it with a scale of its own. Products are rounded: it is for drafts alone."""

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        rows = input.reshape(-1, input.shape[-1]).to(self._scales.dtype).contiguous()
        output = torch._weight_int8pack_mm(rows, self._packed, self._scales).to(input.dtype)
        output = output.view(*input.shape[:-1], -1)
        return output if bias is None else output + bias

    def _take(self, weight: Tensor) -> None:
        largest = weight.abs().amax(dim=1).float().clamp_min(SMALLEST_SCALE)
        self._scales = (largest / LARGEST_INT8).bfloat16()  # what the product is fast with, whatever the model's dtype
        rounded = (weight.float() / self._scales.float()[:, None]).round()
        self._packed = rounded.clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)


# By kind and addresses; models may share them.
_known: WeakValueDictionary[tuple[Any, ...], PackedWeight] = WeakValueDictionary()
_paying: dict[tuple[type[PackedWeight], torch.dtype, int, int], bool] = {}  # by threads and one of PROBED_ROWS


def packed(*weights: Tensor, kind: type[PackedWeight] = PackedWeight) -> PackedWeight:
    """Weights packed together, or what others that have the same weights have packed."""
    key = _key_of(weights, kind)
    known = _known.get(key)
    if known is None or not known.is_of(*weights, sampled=True):
        _known[key] = known = kind(*weights)
    return known


def _key_of(weights: Sequence[Tensor], kind: type[PackedWeight]) -> tuple[Any, ...]:
    return (kind, *[weight.data_ptr() for weight in weights])


def pays(dtype: torch.dtype, rows: int, kind: type[PackedWeight] = PackedWeight) -> bool:
    """Whether weights of a kind are the faster ones for so many rows on this machine; measured once."""
    if rows < PROBED_ROWS[0] or not can_pack(dtype):
        return False
    probed = max(known for known in PROBED_ROWS if known <= rows)
    key = kind, dtype, torch.get_num_threads(), probed
    if key not in _paying:
        _paying[key] = _is_faster(dtype, probed, kind)
    return _paying[key]


@torch.inference_mode(False)  # tensors made in it have no versions
@torch.no_grad()
def _is_faster(dtype: torch.dtype, rows: int, kind: type[PackedWeight]) -> bool:
    weights = [torch.full((PROBED_SIZE, PROBED_SIZE), 0.5, dtype=dtype) for _ in range(PROBED_WEIGHTS)]
    input = torch.full((rows, PROBED_SIZE), 0.5, dtype=dtype)
    plain = least_seconds(lambda: [functional.linear(input, weight) for weight in weights], REPEATS)
    others = [_seconds_of(PackedWeight, weights, input)] if kind is not PackedWeight else []
    return _seconds_of(kind, weights, input) < min([plain, *others])


def _seconds_of(kind: type[PackedWeight], weights: list[Tensor], input: Tensor) -> float:
    copies = [kind(weight) for weight in weights]
    return least_seconds(lambda: [copy.apply(input, None) for copy in copies], REPEATS)


def _packed_linear(input: Tensor, weight: Tensor, bias: Tensor | None, int8: bool = False) -> Tensor:
    return _joined_linear(input, [weight], bias, int8)


def _joined_linear(input: Tensor, weights: list[Tensor], bias: Tensor | None, int8: bool = False) -> Tensor:
    known = _known.get(_key_of(weights, Int8Weight if int8 else PackedWeight))
    return functional.linear(input, torch.cat(weights), bias) if known is None else known.apply(input, bias)


# Ops that find packed weights by the address of the plain ones: those have no form that a graph could be handed.
_ops = torch.library.Library("tide_hf", "DEF")
_ops.define("packed_linear(Tensor input, Tensor weight, Tensor? bias, bool int8=False) -> Tensor")
_ops.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
_ops.define("joined_linear(Tensor input, Tensor[] weights, Tensor? bias, bool int8=False) -> Tensor")
_ops.impl("joined_linear", _joined_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("tide_hf::packed_linear", lib=_ops)
def _like_packed_linear(input: Tensor, weight: Tensor, bias: Tensor | None, int8: bool = False) -> Tensor:
    return _like_joined_linear(input, [weight], bias, int8)


@torch.library.register_fake("tide_hf::joined_linear", lib=_ops)
def _like_joined_linear(input: Tensor, weights: list[Tensor], _bias: Tensor | None, _int8: bool = False) -> Tensor:
    return input.new_empty((*input.shape[:-1], sum(weight.shape[0] for weight in weights)))


@lru_cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by weights of this dtype here."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_WEIGHTS)].clone()
