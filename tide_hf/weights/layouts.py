"""Layouts in which linear layers on a CPU can read their weights, the ops that use them, and the choice of the fastest.

PyTorch's linear passes plain weights to MKL, or in bfloat16 to oneDNN. For more than a few rows both repack them into
their own layout at every call, which doubles the cost of a verify pass; on some CPUs MKL is slow even for one row. A
verify pass over a few tokens is bound by the bandwidth with which it reads the weights.

- Prepacked weights are repacked once and kept, at the cost of a copy. oneDNN takes 12 us to start each product, and a
  pass in a model of 30 layers has 120 products.
- The skinny GEMM reads plain weights sequentially, once for all rows of the input, without a copy. It sums in the same
  order for any number of rows, so a pass over several tokens rounds as passes over single tokens do.
- Copies in half precision, and of weights whose values need fewer bits than their dtype has, are read in panels; see
  `lossless`. For drafts, weights are also quantised to int8: a half or a quarter of the bytes.
- On CPUs without bfloat16 or float16 instructions, PyTorch multiplies weights of these dtypes several times slower
  than float32, so they are upcast to float32, chunk by chunk, at each call.

Except with quantised weights, results differ from PyTorch's by rounding alone, as between passes of two widths.
Which layout is the fastest for a number of rows is measured on this machine, once for all processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from ..common.measurements import measured
from ..common.memory import copy_if_it_fits
from ..common.timing import least_seconds
from ..kernels.cpu.cpp_kernels import CPU_DTYPES, are_ready, load_op
from .panels import PANEL_ROWS, in_panels

UPCAST_CHUNK = 1 << 20  # values of a weight that are upcast at a time
MAX_QUANTIZED = 127  # of the integers that drafts read
MIN_SCALE = 1e-30  # avoids a division by zero in rows of zeros

DECODE_ROWS = (1, 2, 4, 8, 16)  # measured together
USUAL_ROWS = (1, 2, 4)  # of passes that read one layout whatever their width
PROBED_ROWS = (*DECODE_ROWS, 64, 128, 256, 1024)  # each measurement holds up to the next number of rows
PROBED_SIZE, PROBED_WEIGHTS = 1024, 16  # the probed weights together exceed a core's caches
FEW_WEIGHTS, COMPUTE_BOUND_ROWS = 4, 64  # products of this many rows are compute-bound, so fewer weights suffice
MANY_ROWS = 256
COPY_PAYS_AFTER = 48  # tokens per row; a copy takes as long as five passes, and gains little in each
COPY_GAIN = 1.12  # minimum speed-up for a copy of weights, which takes memory and gains less on smaller weights
COMPUTE_BOUND_GAIN = 1.12  # minimum speed-up of compute-bound products, where layouts differ by little more than noise
CLEAR_GAIN = 1.5
REPEATS = 2


class WeightLayout:
    """A weight (out, in) in one layout, or the concatenated weights of linear layers that read the same input."""

    is_copy: ClassVar[bool] = True  # whether the layout takes memory of its own
    pays_after: ClassVar[int] = COPY_PAYS_AFTER  # tokens per row to decode, from which eager calls may convert to it
    probed_value: ClassVar[float] = 0.5  # of weights that the layout is measured with
    is_traceable: ClassVar[bool] = False  # whether graphs can record `apply`; else they record an op of this module
    sums_alike: ClassVar[bool] = False  # whether the order of a sum does not depend on the number of rows
    upcasts: ClassVar[bool] = False  # whether float32 inputs may be multiplied by weights in half precision

    def __init__(self, *weights: Tensor) -> None:
        self.weights = weights
        self.versions = [version_of(weight) for weight in weights]
        is_copy = self.is_copy or not all(weight.is_contiguous() for weight in weights)
        self.samples = [_sample(weight).clone() for weight in weights] if is_copy else []
        self._convert([weight.detach() for weight in weights])

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Whether this layout suits the dtype and number of rows on this CPU; by default, if oneDNN has the dtype."""
        return can_pack(dtype)

    @property
    def number(self) -> int:
        """The index of this class in `WEIGHT_LAYOUTS`, which ops take as an argument."""
        return WEIGHT_LAYOUTS.index(type(self))

    def is_of(self, *weights: Tensor, sampled: bool = False) -> bool:
        """Whether this was made from `weights`, unchanged since; `sampled` checks values too, to see `.data` writes."""
        if len(weights) != len(self.weights):  # quantised ones may have got zero points
            return False
        for weight, known, version in zip(weights, self.weights, self.versions, strict=True):
            if weight is not known or version_of(weight) != version:
                return False
        return not (sampled and self.samples) or all(map(torch.equal, self.samples, map(_sample, weights)))

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        raise NotImplementedError

    def _convert(self, weights: list[Tensor]) -> None:
        raise NotImplementedError


class PrepackedWeight(WeightLayout):
    """A weight prepacked in oneDNN's layout."""

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        if bias is not None:
            bias = bias.contiguous()  # the op ignores strides
        return self._product(input, self._packed, bias, "none", [], "")

    def _convert(self, weights: list[Tensor]) -> None:
        self._product: Any = torch.ops.mkldnn._linear_pointwise.default
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(_concatenated(weights), None)


class UpcastWeight(WeightLayout):
    """A bfloat16 or float16 weight as the model stores it, upcast to float32 chunk by chunk at each call."""

    is_copy, pays_after, upcasts = False, 0, True

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Whether the dtype is half precision that oneDNN does not support on this CPU."""
        return dtype in (torch.bfloat16, torch.float16) and not can_pack(dtype)

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        wide, end = input.float(), 0
        found: list[Tensor] = []
        for weight in self._plain:
            for piece in weight.split(max(1, UPCAST_CHUNK // weight.shape[1])):
                start, end = end, end + len(piece)
                part_of_bias = None if bias is None else bias[start:end].float()
                found.append(_float_linear(wide, piece.float(), part_of_bias).to(input.dtype))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _convert(self, weights: list[Tensor]) -> None:
        self._plain = weights


class PlainWeight(WeightLayout):
    """A weight as the model stores it, read by the skinny GEMM without a copy."""

    is_copy, pays_after, sums_alike, upcasts = False, 0, True, True
    plain: list[Tensor]  # (out, in) each

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Whether the kernel can be compiled; the number of rows does not matter."""
        return load_op("skinny_gemm", dtype) is not None

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        product: Any = load_op("skinny_gemm", input.dtype)
        return product(input, self.plain, bias, [])

    def _convert(self, weights: list[Tensor]) -> None:
        self.plain = [weight.contiguous() for weight in weights]  # keeps the values alive when `.data` is replaced


class StoredWeight(WeightLayout):
    """A weight that the skinny GEMM reads as integers, or in panels (see `panels`), which may have rows of padding."""

    is_traceable = sums_alike = True
    # (out, in) int8; (out, in / 2) uint8, int4 as PyTorch packs it for CPUs; or, in panels, values in half precision,
    # int8 or int4.
    values: Tensor
    # Of int8 (out,), (out, groups), or (out, groups, 2) with zeros; of int4 (groups, out, 2); of integers in panels
    # (out,) or (out / 16, groups, 2, 16), in half precision where that is exact; else (0,).
    scales: Tensor

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Whether the kernel can be compiled; the number of rows does not matter."""
        return PlainWeight.serves(dtype, rows)

    @property
    def padding(self) -> int:
        """Rows that the layout has beyond those of the weight."""
        return PANEL_ROWS * len(self.values) - len(self.weights[0]) if self.values.dim() == 4 else 0

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        product: Any = load_op("skinny_gemm", input.dtype)
        if not self.padding:
            return product(input, [self.values], bias, [self.scales])
        bias = None if bias is None else functional.pad(bias, (0, self.padding))
        return product(input, [self.values], bias, [self.scales])[..., : -self.padding]


class QuantizedWeight(StoredWeight):
    """A weight quantised to int8 in panels, with one scale per row. Lossy, so only for drafts."""

    upcasts = True

    def _convert(self, weights: list[Tensor]) -> None:
        weight = weights[0].float()
        scales = (weight.abs().amax(dim=1) / MAX_QUANTIZED).clamp_min(MIN_SCALE)
        self.values = in_panels((weight / scales[:, None]).round().to(torch.int8))
        self.scales = functional.pad(scales, (0, -len(scales) % PANEL_ROWS))


Layouts = tuple[type[WeightLayout], ...]

WEIGHT_LAYOUTS: Layouts = (PrepackedWeight, PlainWeight, UpcastWeight)  # which ops look up
PYTORCH_LAYOUTS: Layouts = (PrepackedWeight, UpcastWeight)

# Converted weights by layout class, and by address, shape and stride; models may share weights.
_known: WeakValueDictionary[tuple[Any, ...], WeightLayout] = WeakValueDictionary()


def in_layout(layout: type[WeightLayout], *weights: Tensor) -> WeightLayout:
    """Convert weights to a layout together, or return the existing conversion of the same weights."""
    key = _key_of(weights, layout)
    known = _known.get(key)
    if known is None or not known.is_of(*weights, sampled=True):
        _known[key] = known = layout(*weights)
    return known


def hold_samples(layouts: Iterable[WeightLayout]) -> bool:
    """Whether the weights that layouts were made from hold what was sampled from them."""
    sampled = [made for made in layouts if made.samples]
    weights, samples = ([one for made in sampled for one in getattr(made, name)] for name in ("weights", "samples"))
    dtype = next((dtype for dtype in CPU_DTYPES if are_ready(dtype)), None)
    op: Any = None if dtype is None else load_op("are_samples", dtype)
    if op is not None and weights and all(weight.is_contiguous() for weight in weights):  # ten times as fast
        return bool(op(weights, samples, [_sampling_step(weight) for weight in weights]))
    return all(map(torch.equal, samples, map(_sample, weights)))


def _key_of(weights: Sequence[Tensor], layout: type[WeightLayout]) -> tuple[Any, ...]:
    """A key with shapes and strides, since views of one weight may share its address (rows, or a transpose)."""
    return (layout, *[(weight.data_ptr(), weight.shape, weight.stride()) for weight in weights])


def _linear(input: Tensor, weights: list[Tensor], bias: Tensor | None, layout: int = 0) -> Tensor:
    known = _known.get(_key_of(weights, WEIGHT_LAYOUTS[layout]))
    if known is not None:
        return known.apply(input, bias)
    return functional.linear(input, _concatenated(weights).to(input.dtype), bias)


def _empty(input: Tensor, weights: list[Tensor]) -> Tensor:
    return input.new_empty((*input.shape[:-1], sum(weight.shape[0] for weight in weights)))


# An op that looks up the converted weights by the plain weights, one or several that are fused: a graph cannot take
# oneDNN's packed tensors as inputs.
_ops = torch.library.Library("tide_hf", "DEF")
_ops.define("linear(Tensor input, Tensor[] weights, Tensor? bias, int layout=0) -> Tensor")
_ops.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("tide_hf::linear", lambda input, weights, *_: _empty(input, weights), lib=_ops)


# Seconds, by layout (`None` is PyTorch's linear), dtype, threads and one of PROBED_ROWS; and by the dtype of the
# weights, where that is another one.
_measured: dict[tuple[Any, ...], float] = {}


def fastest_layout(
    dtype: torch.dtype, rows: int, layouts: Layouts, of_weights: torch.dtype | None = None
) -> type[WeightLayout] | None:
    """The fastest of `layouts` for a number of rows; `None` if PyTorch's linear is the fastest. Measured once.

    Where all layouts sum in one order for any number of rows, all of `USUAL_ROWS` decide together, and PyTorch's linear
    is not among them. A symbolic number of rows is one of a prompt; `layouts` serve all of those then.

    Args:
        dtype: Of the input.
        rows: Of the input.
        layouts: Those to choose from.
        of_weights: Dtype of weights in half precision, if the input is in float32: PyTorch's linear cannot take those.
    """
    of_weights = None if of_weights is dtype else of_weights
    if of_weights is not None:
        layouts = tuple(layout for layout in layouts if layout.upcasts)
        layouts = layouts if UpcastWeight in layouts or sum_alike(layouts) else (*layouts, UpcastWeight)
    key = layouts, torch.get_num_threads(), of_weights
    if type(rows) is not int:  # a symbolic size of a trace: comparing it limits the sizes that the graph serves
        symbolic, rows = rows, PROBED_ROWS[0]
        for known in PROBED_ROWS[1:]:
            if _fastest_layout(dtype, known, *key) is not _fastest_layout(dtype, rows, *key):
                if symbolic < known:
                    break
                rows = known
    return _fastest_layout(dtype, rows, *key)


def sum_alike(layouts: Layouts) -> bool:
    """Whether products in any of these layouts sum in one order for any number of rows."""
    return bool(layouts) and all(layout.sums_alike for layout in layouts)


@lru_cache(maxsize=1024)  # called for every linear layer of every pass
def _fastest_layout(
    dtype: torch.dtype, rows: int, layouts: Layouts, _threads: int, of_weights: torch.dtype | None
) -> type[WeightLayout] | None:
    if rows < PROBED_ROWS[0]:
        return None
    is_alike = sum_alike(layouts)
    probed = USUAL_ROWS if is_alike else (max(known for known in PROBED_ROWS if known <= rows),)
    among: list[type[WeightLayout] | None] = [layout for layout in layouts if layout.serves(dtype, probed[-1])]
    if of_weights is not None and not is_alike:
        among = [*(layout for layout in among if layout is not UpcastWeight), UpcastWeight]
    elif not (is_alike and among):
        among.insert(0, None)
    if len(among) == 1:
        return among[0]

    def cost(layout: type[WeightLayout] | None) -> float:
        return sum(_seconds_of(layout, dtype, one, of_weights) for one in probed) * _required_gain(layout, probed[-1])

    return min(among, key=cost)


def _required_gain(layout: type[WeightLayout] | None, rows: int) -> float:
    """The minimum speed-up over PyTorch's linear at which a layout is chosen."""
    if layout is None:
        return 1.0
    return (COPY_GAIN if layout.is_copy else 1.0) * (COMPUTE_BOUND_GAIN if rows >= COMPUTE_BOUND_ROWS else 1.0)


def _seconds_of(
    layout: type[WeightLayout] | None, dtype: torch.dtype, rows: int, of_weights: torch.dtype | None = None
) -> float:
    threads, of = torch.get_num_threads(), () if of_weights is None else (of_weights,)
    key: tuple[Any, ...] = (layout, dtype, threads, rows, *of)
    if key not in _measured:
        together = DECODE_ROWS if rows in DECODE_ROWS else (rows,)
        is_mixed = of_weights is not None
        numbers = [one for one in together if layout is None or is_mixed or layout.serves(dtype, one)]
        by = f" by {of_weights}" if is_mixed else ""
        name = f"{'linear' if layout is None else layout.__name__}, {dtype}{by}, {numbers} rows"
        found = copy_if_it_fits(
            lambda: measured(name, len(numbers), lambda: _measure(layout, dtype, numbers, of_weights or dtype)),
            PROBED_WEIGHTS * PROBED_SIZE**2 * dtype.itemsize,
        )
        if found is None:
            found = [math.inf] * len(numbers)
        _measured.update({(layout, dtype, threads, one, *of): value for one, value in zip(numbers, found, strict=True)})
    return _measured[key]


@torch.inference_mode(False)  # inference tensors have no versions
@torch.no_grad()
def _measure(
    layout: type[WeightLayout] | None, dtype: torch.dtype, numbers: Sequence[int], of_weights: torch.dtype
) -> list[float]:
    """The seconds of products with each number of rows in a layout."""
    count = PROBED_WEIGHTS if numbers[0] < COMPUTE_BOUND_ROWS else FEW_WEIGHTS
    value = WeightLayout.probed_value if layout is None else layout.probed_value
    weights = [torch.full((PROBED_SIZE, PROBED_SIZE), value, dtype=of_weights, device="cpu") for _ in range(count)]
    taken = None if layout is None else [layout(weight) for weight in weights]

    def multiply(rows: int) -> float:
        input = torch.full((rows, PROBED_SIZE), 0.5, dtype=dtype, device="cpu")
        if taken is None:
            return least_seconds(lambda: [functional.linear(input, weight) for weight in weights], REPEATS)
        return least_seconds(lambda: [one.apply(input, None) for one in taken], REPEATS)

    return [multiply(rows) for rows in numbers]


def clearly_faster_layout(dtype: torch.dtype) -> type[WeightLayout] | None:
    """The layout that needs no compiler and is clearly faster than PyTorch's linear for many rows, or `None`.

    Prepacked weights are faster on CPUs that MKL is not tuned for, upcast weights on CPUs without instructions for the
    dtype. The margin keeps the choice from depending on the noise of a measurement.
    """
    for layout in PYTORCH_LAYOUTS:
        if layout.serves(dtype, MANY_ROWS):
            is_faster = _seconds_of(layout, dtype, MANY_ROWS) * CLEAR_GAIN < _seconds_of(None, dtype, MANY_ROWS)
            return layout if is_faster else None
    return None


@lru_cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports this dtype on this CPU."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _float_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not can_pack(torch.float32):
        return functional.linear(input, weight, bias)
    product: Any = torch.ops.mkldnn._linear_pointwise.default  # accepts weights that are not packed, too
    return product(input, weight, bias, "none", [], "")


def _concatenated(weights: list[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def version_of(weight: Tensor) -> tuple[int, int]:
    """A version that changes with the weight, unless the weight is written through `.data` or by another library."""
    return weight._version, weight.data_ptr()


def _sampling_step(weight: Tensor) -> int:
    return max(1, weight.shape[-1] - 1)


def _sample(weight: Tensor) -> Tensor:
    """One value per row, on a diagonal, so that a write to any row or column is noticed."""
    step, weight = _sampling_step(weight), weight.detach()
    if weight.is_contiguous():  # one operation, since every call of `generate` samples all weights
        return weight.as_strided((-(-weight.numel() // step),), (step,))
    return weight.reshape(-1)[::step]
