"""Weights that torchao or optimum-quanto has quantised to integers, multiplied as they are stored.

For each product these packages convert all integers of a weight to floating point, which takes longer than the product,
or multiply int4 weights by an op of PyTorch that is slow in float32. The skinny GEMM reads the integers themselves, a
quarter or an eighth of the bytes of float32, and scales them. Results differ from the package's by rounding alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.cpu.cpp_kernels import load_op
from .layouts import StoredWeight
from .panels import PANEL_ROWS, in_panels, scales_in_panels

# Of the input, for int8 weights. Products of more rows are compute-bound, and the package's own is then as fast, or
# faster where the CPU has instructions for half precision.
MAX_ROWS, MAX_FLOAT_ROWS = 16, 64
GROUP_MULTIPLE, INT4_ROWS = 16, 64  # what the kernel needs a group's integers, and the rows of int4 weights, to be of
PROBED_SIZE, PROBED_GROUP = 64, 32


class IntegerWeight(StoredWeight):
    """Integers and their scales, one per row or per group of a row, in floating point; with zeros or without."""

    is_copy, pays_after = False, 0

    @staticmethod
    def serves(dtype: torch.dtype, rows: int, integers: torch.dtype = torch.int8) -> bool:
        """Whether the kernel can be compiled for inputs of this dtype, reads such integers, and is faster."""
        product = load_op("skinny_gemm", dtype)
        if product is None:
            return False
        if integers is torch.uint8:
            return _reads_int4(product, dtype)
        return rows <= (MAX_FLOAT_ROWS if dtype is torch.float32 else MAX_ROWS)

    def _convert(self, weights: list[Tensor]) -> None:
        integers, scales, *zero_points = weights
        scales = scales.float()
        if integers.dtype is torch.int8 and scales.numel() == len(integers) and not zero_points:
            scales = scales.flatten()
        for zero_point in zero_points:
            scales = torch.stack([scales, -scales * zero_point], dim=-1)
        self.values, self.scales = integers.contiguous(), scales.contiguous()


class PanelIntegers(IntegerWeight):
    """The same in panels: a copy, of int8 alone, since PyTorch packs int4 in such an order itself."""

    is_copy, pays_after = True, 12

    @staticmethod
    def serves(dtype: torch.dtype, rows: int, integers: torch.dtype = torch.uint8) -> bool:
        """Whether the integers are int8 as well; never for weights that are none."""
        return integers is torch.int8 and IntegerWeight.serves(dtype, rows, integers)

    def _convert(self, weights: list[Tensor]) -> None:
        super()._convert(weights)
        if self.scales.dim() > 1:
            both = self.scales if self.scales.dim() == 3 else torch.stack([self.scales, 0 * self.scales], dim=-1)
            self.scales = scales_in_panels(*both.unbind(-1))
        else:
            self.scales = functional.pad(self.scales, (0, -len(self.scales) % PANEL_ROWS))
        self.values = in_panels(self.values)


@lru_cache
@torch.no_grad()
@_disable_current_modes()  # those of a trace, which has no values
def _reads_int4(product: OpOverload, dtype: torch.dtype) -> bool:
    """Whether the kernel gives the products of PyTorch's op, whose way of packing int4 depends on the CPU."""
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(16, (INT4_ROWS, PROBED_SIZE), dtype=torch.int32, generator=generator)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
    scales = torch.ones(PROBED_SIZE // PROBED_GROUP, INT4_ROWS, 2)
    state = torch.eye(PROBED_SIZE, dtype=dtype)  # the products are integers, so that none is rounded
    expected = torch.ops.aten._weight_int4pack_mm_for_cpu(state, packed, PROBED_GROUP, scales.to(dtype))
    return torch.equal(product(state, [packed], None, [scales]), expected)


def integers_of(linear: nn.Module) -> tuple[Tensor, ...] | None:
    """The integers, scales and, unless all are zero, zero points of a linear layer's quantised weight.

    Returns `None` if the kernel cannot read them, and for layers that quantise or scale their input.
    """
    weight: Any = linear._parameters.get("weight")
    package = type(weight).__module__.partition(".")[0]
    if package == "torchao":
        found = _torchao_integers(weight)
    elif package == "optimum":
        found = _quanto_integers(weight, linear)
    else:
        return None
    if found is None or not all(type(tensor) is Tensor and tensor.is_cpu for tensor in found):
        return None
    return found if _is_readable(*found) and not found[0].is_inference() else None


def _is_readable(integers: Tensor, scales: Tensor, *zero_points: Tensor) -> bool:
    if integers.dim() != 2:
        return False
    rows, size = integers.shape
    if integers.dtype is torch.int8:
        groups = scales.shape[1] if scales.dim() == 2 else 1
        if groups == 1 and not zero_points:
            return scales.numel() == rows
        is_known = scales.shape == (rows, groups) and all(zeros.shape == scales.shape for zeros in zero_points)
    else:
        size, groups = 2 * size, scales.shape[0] if scales.dim() > 0 else 0
        is_known = integers.dtype is torch.uint8 and scales.shape == (groups, rows, 2) and rows % INT4_ROWS == 0
    return is_known and groups > 0 and size % (groups * GROUP_MULTIPLE) == 0


def _torchao_integers(weight: Any) -> tuple[Tensor, ...] | None:
    """Of `Int8Tensor`, `IntxUnpackedToInt8Tensor`, and `Int4OpaqueTensor`, whose scales hold zeros as well."""
    of_input = ("act_quant_kwargs", "act_pre_scale", "activation_quantization", "act_mapping_type")
    if any(getattr(weight, name, None) is not None for name in of_input):
        return None
    scales: Any = getattr(weight, "scale_and_zero", getattr(weight, "scale", None))
    if not hasattr(weight, "qdata") or scales is None:
        return None
    zero_point: Any = getattr(weight, "zero_point", None)
    if zero_point is not None and bool(zero_point.any()):
        return weight.qdata, scales, zero_point
    return weight.qdata, scales


def _quanto_integers(weight: Any, linear: Any) -> tuple[Tensor, Tensor] | None:
    """Of `WeightQBytesTensor`."""
    if getattr(linear, "activation_qtype", None) is not None or getattr(weight, "axis", None) != 0:
        return None
    return getattr(weight, "_data", None), getattr(weight, "_scale", None)  # type: ignore[return-value]  # both or none
