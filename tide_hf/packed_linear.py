"""Linear layers over a handful of rows on a CPU, where a verify pass would otherwise cost two plain ones.

In float32 PyTorch's linear calls MKL's matrix product, which from four rows on copies the weights into a layout of its
own at every call: reading them costs once what a token costs, copying them once more. Up to `PACKED_ROWS` rows run on
weights that were copied once and kept; up to `TRANSPOSED_ROWS` rows run as weight times input, where MKL copies the
input instead. Results differ from the plain call's by float32 rounding, as those of passes of another width do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import UnsupportedOptionError, describe
from .skipping import Gate, active_run
from .structure import DecoderStructure

FEWEST_ROWS = 4  # fewer take another way through MKL, which reads the weights as they are
PACKED_ROWS = 8
TRANSPOSED_ROWS = 48
SAMPLED_WEIGHTS = 64
MEMORY_SHARE = 0.25  # of the free memory that "auto" may fill with packed weights


class LinearGate(Gate):
    """Stands in for the `forward` of one `nn.Linear`; it packs the weights when it first has use for them.

    Args:
        linear: The layer.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._size = linear.in_features
        self._packed: Tensor | None = None
        self._source: tuple[Tensor, int, Tensor] | None = None  # the weight, its version, and a sample of it

    def __call__(self, input: Tensor) -> Tensor:  # the name that nn.Linear gives it
        """Run the layer; natively outside TIDE's passes and for other numbers of rows."""
        rows = input.numel() // self._size
        weight: Any = self.module.weight
        if rows < FEWEST_ROWS:  # by far the most frequent case, told apart with the least work
            return functional.linear(input, weight, self.module.bias)  # type: ignore[arg-type]
        if (
            rows > TRANSPOSED_ROWS
            or active_run() is None
            or torch.is_grad_enabled()
            or input.dtype is not torch.float32
            or not _is_plain(weight)
        ):
            return self.native(input)
        packed = self.packed() if rows <= PACKED_ROWS else None
        return linear_over_few_rows(input, weight, self.module.bias, packed)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles pack their own weights."""
        return {**self.__dict__, "_packed": None, "_source": None}

    @property
    def kept(self) -> Tensor | None:
        """The packed weights, if there are any; packed anew they are another tensor."""
        return self._packed

    def release(self) -> None:
        """Give the memory of the packed weights back."""
        self._packed = self._source = None

    def release_if_changed(self) -> None:
        """Forget packed weights whose originals were replaced or written to, also by way of `.data`."""
        weight: Any = self.module.weight
        if self._source is not None and not self._is_packed(weight, sampled=True):
            self.release()

    def packed(self) -> Tensor:
        """The packed weights; they are packed now if they are not yet, or have changed."""
        weight: Any = self.module.weight
        if self._packed is None or not self._is_packed(weight):
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), PACKED_ROWS)
            self._source = (weight, weight._version, _sample(weight))
        return self._packed

    def _is_packed(self, weight: Tensor, sampled: bool = False) -> bool:
        if self._source is None:
            return False
        source, version, sample = self._source
        return source is weight and version == weight._version and (not sampled or torch.equal(sample, _sample(weight)))


def linear_over_few_rows(input: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """Apply a linear layer to more rows than MKL multiplies by as they are, and at most `TRANSPOSED_ROWS`.

    Args:
        input: (..., in) float32.
        weight: (out, in).
        bias: (out,) or `None`.
        packed: `weight` in MKL's layout, for up to `PACKED_ROWS` rows; without it MKL copies the input instead.

    Returns:
        (..., out).
    """
    flat = input.reshape(-1, input.shape[-1])
    rows = flat.shape[0]
    if packed is None or rows > PACKED_ROWS:
        output = torch.mm(weight, flat.t()).t().contiguous()
        output = output if bias is None else output + bias
    else:
        padded = functional.pad(flat, (0, 0, 0, PACKED_ROWS - rows))
        is_traced = type(padded) is not Tensor or torch.compiler.is_compiling()
        product = torch.ops.tide_hf.packed_linear if is_traced else _packed_linear
        output = product(padded, packed, weight, bias)[:rows]
    return output.reshape(*input.shape[:-1], -1)


def _packed_linear(input: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkl._mkl_linear(input, packed, weight, bias, PACKED_ROWS)


# An op of our own, since Inductor takes MKL's for one whose packed weights are constants.
_ops = torch.library.Library("tide_hf", "DEF")
_ops.define("packed_linear(Tensor input, Tensor packed, Tensor weight, Tensor? bias) -> Tensor")
_ops.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("tide_hf::packed_linear", lib=_ops)
def _shape_of_packed_linear(input: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def linears_to_pack(structure: DecoderStructure, pack_weights: bool | str) -> list[nn.Linear]:
    """The linear layers of the decoder and its head whose weights may be packed.

    Args:
        structure: The base model's structure.
        pack_weights: `True`; `False`; or `"auto"`: where a second copy of the weights takes at most a quarter of the
            free memory.

    Raises:
        UnsupportedOptionError: `True`, and the model or this build of PyTorch cannot.
    """
    if pack_weights is False:
        return []
    linears = list(_linears(structure))
    has_mkl = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    if pack_weights is True and not (has_mkl and linears):
        raise UnsupportedOptionError(
            describe(
                "weights cannot be packed",
                got="no nn.Linear with float32 weights on the CPU" if has_mkl else "a PyTorch without MKL",
                expected="float32 nn.Linear layers on a CPU, and a PyTorch built with MKL",
                do="Leave pack_weights at 'auto', or load the model with dtype=torch.float32 and no device_map.",
            )
        )
    fits = sum(linear.weight.nbytes for linear in linears) <= psutil.virtual_memory().available * MEMORY_SHARE
    return linears if has_mkl and (fits or pack_weights is True) else []


def open_linear_gates(linears: list[nn.Linear]) -> None:
    """Put a gate in front of each linear layer."""
    for linear in linears:
        linear.forward = LinearGate(linear)  # type: ignore[method-assign]


def linear_gates(structure: DecoderStructure) -> Iterator[LinearGate]:
    """The gates that are in place."""
    for module in _modules(structure):
        gate = module.__dict__.get("forward")
        if isinstance(gate, LinearGate):
            yield gate


def remove_linear_gates(structure: DecoderStructure) -> None:
    """Take the gates away, and the packed weights with them."""
    for gate in list(linear_gates(structure)):
        del gate.module.forward


def _modules(structure: DecoderStructure) -> Iterator[nn.Module]:
    for layer in structure.layers:
        yield from layer.modules()
    yield structure.head


def _linears(structure: DecoderStructure) -> Iterator[nn.Linear]:
    """Layers whose weights stay where they are; accelerate puts its own forward on those that it moves."""
    for module in _modules(structure):
        is_moved = not isinstance(module.__dict__.get("forward", None), (LinearGate, type(None)))
        if type(module) is nn.Linear and not is_moved and _is_plain(module.weight):
            yield module


def _is_plain(weight: Tensor) -> bool:
    """Whether MKL can read it: quantised and distributed weights are subclasses of `Parameter`, or of `Tensor`."""
    is_float32_on_cpu = weight.dtype is torch.float32 and weight.device.type == "cpu"
    return is_float32_on_cpu and type(weight) is nn.Parameter and not weight.is_inference()


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_WEIGHTS)].clone()
