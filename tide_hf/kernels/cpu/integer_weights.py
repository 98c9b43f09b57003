"""Weights that torchao or optimum-quanto has quantised to integers, multiplied as they are stored.

These packages convert all integers of a weight to floating point for each product, which takes longer than the product.
The skinny GEMM reads the integers themselves, a quarter of the bytes of float32, and scales its sums. Results differ
from the package's by rounding alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .cpp_kernels import load_op
from .weight_layouts import WeightLayout

# Of the input. Products of more rows are compute-bound, and the package's own is then as fast, or faster where the CPU
# has instructions for half precision.
MAX_ROWS, MAX_FLOAT_ROWS = 16, 64


class IntegerWeight(WeightLayout):
    """Integers (out, in) in int8 and their scales, one per row, in floating point."""

    is_copy, is_traceable = False, True
    integers: Tensor  # (out, in) int8
    scales: Tensor  # (out,) float32

    @staticmethod
    def serves(dtype: torch.dtype, rows: int) -> bool:
        """Whether there are few rows and the kernel can be compiled for inputs of this dtype."""
        most = MAX_FLOAT_ROWS if dtype is torch.float32 else MAX_ROWS
        return rows <= most and load_op("skinny_gemm", dtype) is not None

    def apply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out)."""
        product: Any = load_op("skinny_gemm", input.dtype)
        return product(input, [self.integers], bias, [self.scales])

    def _convert(self, weights: list[Tensor]) -> None:
        integers, scales = weights
        self.integers, self.scales = integers.contiguous(), scales.float().flatten().contiguous()


def integers_of(linear: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The integers (out, in) and the scales of a linear layer's quantised weight, if the kernel can read them.

    Returns `None` for weights with zero points or several scales per row, and for layers that quantise their input.
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
    integers, scales = found
    is_known = integers.dtype is torch.int8 and integers.dim() == 2 and scales.numel() == integers.shape[0]
    return found if is_known and not integers.is_inference() else None


def _torchao_integers(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Of `Int8Tensor` and `IntxUnpackedToInt8Tensor`."""
    of_input = ("act_quant_kwargs", "act_pre_scale", "activation_quantization")
    if any(getattr(weight, name, None) is not None for name in of_input):
        return None
    zero_point = getattr(weight, "zero_point", None)
    if not hasattr(weight, "qdata") or (zero_point is not None and bool(zero_point.any())):
        return None
    return weight.qdata, weight.scale


def _quanto_integers(weight: Any, linear: Any) -> tuple[Tensor, Tensor] | None:
    """Of `WeightQBytesTensor`."""
    if getattr(linear, "activation_qtype", None) is not None or getattr(weight, "axis", None) != 0:
        return None
    return getattr(weight, "_data", None), getattr(weight, "_scale", None)  # type: ignore[return-value]  # both or none
