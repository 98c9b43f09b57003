"""Forms in which linear layers on a CPU can read their weights, and ops that use them.

PyTorch's linear hands weights to MKL, or in bfloat16 to oneDNN, as they are stored. From a few rows on either copies
them into a layout of its own at every call, which costs a verify pass once more what a token costs; and there are CPUs
on which MKL reads them slowly even for one row. Weights that were copied once and kept cost neither. A product of our
own reads them where they are, for few rows as fast as memory gives them. Where a CPU has no instructions for products
of bfloat16 or float16, PyTorch multiplies these several times as slowly as floats, which they may become for the time
of a product. Results differ from the plain call's by rounding, as those of passes of another width do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from .products import MOST_ROUNDED_ROWS, rounded_product_of, stored_product_of

WIDENED_VALUES = 1 << 20  # at a time, of a weight
LINE = 64  # weights that have one scale: with one for a whole row a block agreed 0.6% less often, with these as often
LARGEST_ROUNDED, ROUNDED_ZERO = 63, 64
SMALLEST_SCALE = 1e-30  # of zeros


class WeightForm:
    """A weight in some form, or the weights of layers that have one input, behind each other.

    Args:
        *weights: (out, in) each, which it keeps alive.

    Attributes:
        is_copy: Whether it takes memory of its own.
    """

    is_copy: ClassVar[bool] = True

    def __init__(self, *weights: Tensor) -> None:
        self.weights = weights
        self.versions = [_version(weight) for weight in weights]
        is_copy = self.is_copy or not all(weight.is_contiguous() for weight in weights)
        self.samples = [_sample(weight).clone() for weight in weights] if is_copy else []
        self._take([weight.detach() for weight in weights])

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Whether weights in this form can multiply so many rows here; copies can wherever oneDNN has the dtype."""
        return can_pack(dtype)

    @property
    def number(self) -> int:
        """Of its class among `FORMS`, by which ops know it."""
        return FORMS.index(type(self))

    def is_of(self, *weights: Tensor, sampled: bool = False) -> bool:
        """Whether it still is those weights; `sampled` looks at values, which `.data` can change without notice."""
        for weight, known, version in zip(weights, self.weights, self.versions, strict=True):
            if weight is not known or _version(weight) != version:
                return False
        return not (sampled and self.samples) or all(map(torch.equal, self.samples, map(_sample, weights)))

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        raise NotImplementedError

    def _take(self, weights: list[Tensor]) -> None:
        raise NotImplementedError


class PackedWeight(WeightForm):
    """In oneDNN's layout."""

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        if bias is not None:
            bias = bias.contiguous()  # the op reads one number after the other, whatever the stride is
        return self._product(input, self._packed, bias, "none", [], "")

    def _take(self, weights: list[Tensor]) -> None:
        self._product: Any = torch.ops.mkldnn._linear_pointwise.default
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(_joined(weights), None)


class WidenedWeight(WeightForm):
    """As the model stores it, in bfloat16 or float16, made into floats for the time of a product, piece by piece."""

    is_copy = False

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Where oneDNN does not have the dtype."""
        return dtype in (torch.bfloat16, torch.float16) and not can_pack(dtype)

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        wide, end = input.float(), 0
        found: list[Tensor] = []
        for weight in self._stored:
            for piece in weight.split(max(1, WIDENED_VALUES // weight.shape[1])):
                start, end = end, end + len(piece)
                part_of_bias = None if bias is None else bias[start:end].float()
                found.append(_float_linear(wide, piece.float(), part_of_bias).to(input.dtype))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _take(self, weights: list[Tensor]) -> None:
        self._stored = weights


class RoundedWeight(WeightForm):
    """In 7 bits, each 64 of a row with a scale of their own. Products are rounded: it is for drafts alone.

    Attributes:
        packed: (out, lines of 64, 64) uint8, filled up with zeros.
        scales: (out, lines) float32.
    """

    packed: Tensor
    scales: Tensor

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Few rows, where there is a compiler."""
        return rows <= MOST_ROUNDED_ROWS and rounded_product_of(dtype) is not None

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        if input.numel() > MOST_ROUNDED_ROWS * input.shape[-1]:  # where a layer multiplies something but tokens
            return functional.linear(input, _joined([weight.detach() for weight in self.weights]), bias)
        return self._product(input, self.packed, self.scales, bias)

    def _take(self, weights: list[Tensor]) -> None:
        self._product: Any = rounded_product_of(weights[0].dtype)
        weight = _joined(weights).float().contiguous()
        lines = functional.pad(weight, (0, -weight.shape[1] % LINE)).view(weight.shape[0], -1, LINE)
        self.scales = (lines.abs().amax(dim=-1) / LARGEST_ROUNDED).clamp_min(SMALLEST_SCALE)
        rounded = (lines / self.scales[..., None]).round().clamp(-LARGEST_ROUNDED, LARGEST_ROUNDED)
        self.packed = (rounded + ROUNDED_ZERO).to(torch.uint8)


class StoredWeight(WeightForm):
    """As the model stores it, without a copy, for the product that is compiled for this CPU."""

    is_copy = False

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Wherever there is a compiler."""
        return stored_product_of(dtype) is not None

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        return self._product(input, self._stored, bias)

    def _take(self, weights: list[Tensor]) -> None:
        self._product: Any = stored_product_of(weights[0].dtype)
        self._stored = [weight.contiguous() for weight in weights]  # also kept where `.data` gets another


FORMS: tuple[type[WeightForm], ...] = (PackedWeight, RoundedWeight, StoredWeight, WidenedWeight)
UNCOMPILED: tuple[type[WeightForm], ...] = (PackedWeight, WidenedWeight)

# By form, addresses and layouts; models may share them.
_known: WeakValueDictionary[tuple[Any, ...], WeightForm] = WeakValueDictionary()


def in_form(form: type[WeightForm], *weights: Tensor) -> WeightForm:
    """Weights in a form, together, or what others that have the same weights have made of them."""
    key = _key_of(weights, form)
    known = _known.get(key)
    if known is None or not known.is_of(*weights, sampled=True):
        _known[key] = known = form(*weights)
    return known


def _key_of(weights: Sequence[Tensor], form: type[WeightForm]) -> tuple[Any, ...]:
    """Views of one weight may start at one address: some of its rows, or a square one that is turned."""
    return (form, *[(weight.data_ptr(), weight.shape, weight.stride()) for weight in weights])


def _one_linear(input: Tensor, weight: Tensor, bias: Tensor | None, form: int = 0) -> Tensor:
    return _joined_linear(input, [weight], bias, form)


def _joined_linear(input: Tensor, weights: list[Tensor], bias: Tensor | None, form: int = 0) -> Tensor:
    known = _known.get(_key_of(weights, FORMS[form]))
    return functional.linear(input, _joined(weights), bias) if known is None else known.apply(input, bias)


# Ops that find weights in a form by the address of the plain ones: what they hold can be no input of a graph.
_ops = torch.library.Library("tide_hf", "DEF")
_ops.define("linear(Tensor input, Tensor weight, Tensor? bias, int form=0) -> Tensor")
_ops.impl("linear", _one_linear, "CompositeExplicitAutograd")
_ops.define("joined_linear(Tensor input, Tensor[] weights, Tensor? bias, int form=0) -> Tensor")
_ops.impl("joined_linear", _joined_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("tide_hf::linear", lib=_ops)
def _like_linear(input: Tensor, weight: Tensor, bias: Tensor | None, form: int = 0) -> Tensor:
    return _like_joined_linear(input, [weight], bias, form)


@torch.library.register_fake("tide_hf::joined_linear", lib=_ops)
def _like_joined_linear(input: Tensor, weights: list[Tensor], _bias: Tensor | None, _form: int = 0) -> Tensor:
    return input.new_empty((*input.shape[:-1], sum(weight.shape[0] for weight in weights)))


@lru_cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by weights of this dtype here."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _float_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not can_pack(torch.float32):
        return functional.linear(input, weight, bias)
    product: Any = torch.ops.mkldnn._linear_pointwise.default  # also for weights that are not packed
    return product(input, weight, bias, "none", [], "")


def _joined(weights: list[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _version(weight: Tensor) -> tuple[int, int]:
    """Changes with the weight, unless a part of it is written to through `.data`, or another library."""
    return weight._version, weight.data_ptr()


def _sample(weight: Tensor) -> Tensor:
    """One value of each row, each of another column: a row or a column that was written to is noticed."""
    step, weight = max(1, weight.shape[-1] - 1), weight.detach()
    if weight.is_contiguous():  # by one operation: every call of `generate` looks at all weights
        return weight.as_strided((-(-weight.numel() // step),), (step,))
    return weight.reshape(-1)[::step]
