"""Linear layers on a CPU that run on weights in another form, where that is the faster (see `packed_weights`).

A draft step does little else than read weights, and what it finds is verified. So it may read them in 8 bits, with a
scale for each row (compare LLM.int8(), arXiv 2208.07339), which no pass that verifies ever does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from .errors import UnsupportedOptionError, describe
from .packed_weights import INT8_BLOCK, Int8Weight, PackedWeight, can_pack, packed, pays
from .skipping import Gate, active_run
from .structure import DecoderStructure

MEMORY_SHARE = 0.25  # of the free memory that copies of weights may fill

_drafting: ContextVar[bool] = ContextVar("tide_hf_drafting", default=False)


@contextmanager
def drafting(in_int8: bool) -> Iterator[None]:
    """Whether linear layers with gates may run on weights in 8 bits, since what they find is verified."""
    token = _drafting.set(in_int8)
    try:
        yield
    finally:
        _drafting.reset(token)


class LinearGate(Gate):
    """Stands in for the `forward` of one `nn.Linear`; it packs the weights when it first has use for them.

    Args:
        linear: The layer.
        anywhere: Whether it is one of TIDE's own, which runs in nothing but TIDE's passes.
    """

    def __init__(self, linear: nn.Linear, anywhere: bool = False) -> None:
        super().__init__(linear)
        self._size, self._anywhere = linear.in_features, anywhere
        self.kept: dict[type[PackedWeight], PackedWeight] = {}

    def __call__(self, input: Tensor) -> Tensor:  # the name that nn.Linear gives it
        """Run the layer; natively outside TIDE's passes and for numbers of rows for which packing does not pay."""
        weight: Any = self.module.weight
        if (
            (active_run() is None and not self._anywhere)
            or torch.is_grad_enabled()
            or input.dtype is not weight.dtype
            or torch.is_autocast_enabled("cpu")
            or not _is_plain(weight)
        ):
            return self.native(input)
        rows = input.numel() // self._size
        may_round = _drafting.get() and self._size % INT8_BLOCK == 0
        kinds = (Int8Weight, PackedWeight) if may_round else (PackedWeight,)
        kind = next((kind for kind in kinds if pays(input.dtype, rows, kind)), None)  # last, since it measures at first
        if kind is None:
            return self.native(input)
        self.pack(kind)
        return torch.ops.tide_hf.packed_linear.default(input, weight, self.module.bias, kind is Int8Weight)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles pack their own weights."""
        return {**self.__dict__, "kept": {}}

    def release(self) -> None:
        """Give the memory of the packed weights back."""
        self.kept = {}

    def release_if_changed(self) -> None:
        """Forget packed weights whose originals were replaced or written to, also by way of `.data`."""
        weight: Any = self.module.weight
        if not all(kept.is_of(weight, sampled=True) for kept in self.kept.values()):
            self.release()

    def pack(self, kind: type[PackedWeight] = PackedWeight) -> None:
        """Have packed weights; they are packed now if they are not yet, or have changed."""
        weight: Any = self.module.weight
        if kind not in self.kept or not self.kept[kind].is_of(weight):
            self.kept[kind] = packed(weight, kind=kind)


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
    linears = linears_in(*_modules(structure))
    if pack_weights is True and not linears:
        has_any = can_pack(torch.float32)
        raise UnsupportedOptionError(
            describe(
                "weights cannot be packed",
                got="no nn.Linear with such weights on the CPU" if has_any else "a PyTorch without oneDNN",
                expected="nn.Linear layers in float32 on a CPU, or in bfloat16 where oneDNN has it",
                do="Leave pack_weights at 'auto', or load the model with dtype=torch.float32 and no device_map.",
            )
        )
    return linears if pack_weights is True or copies_fit(linears) else []


def copies_fit(linears: Iterable[Any]) -> bool:
    """Whether a copy of the weights of linear layers takes at most a quarter of the free memory."""
    return sum(linear.weight.nbytes for linear in linears) <= psutil.virtual_memory().available * MEMORY_SHARE


def open_linear_gates(linears: list[nn.Linear], anywhere: bool = False) -> None:
    """Put a gate in front of each linear layer that has none; `anywhere` as of [`LinearGate`]."""
    for linear in linears:
        if isinstance(linear.__dict__.get("forward"), LinearGate):  # of routers that two models share
            continue
        linear.forward = LinearGate(linear, anywhere)  # type: ignore[method-assign]


def linear_gates(structure: DecoderStructure, *others: nn.Module | None) -> Iterator[LinearGate]:
    """The gates that are in place in the decoder, its head and `others`, such as a block head."""
    for module in _modules(structure, *others):
        gate = module.__dict__.get("forward")
        if isinstance(gate, LinearGate):
            yield gate


def remove_linear_gates(structure: DecoderStructure, *others: nn.Module | None) -> None:
    """Take the gates away, and the packed weights with them."""
    for gate in list(linear_gates(structure, *others)):
        del gate.module.forward


def linears_in(*modules: nn.Module) -> list[nn.Linear]:
    """The linear layers among `modules` whose weights can be packed.

    Those of other layers may not stay where they are; accelerate puts its own forward on what it moves.
    """
    kinds = (LinearGate, type(None))
    stay = [module for module in modules if isinstance(module.__dict__.get("forward"), kinds)]
    return [module for module in stay if type(module) is nn.Linear and _is_plain(module.weight)]


def _modules(structure: DecoderStructure, *others: nn.Module | None) -> Iterator[nn.Module]:
    for module in (*structure.layers, structure.head, *others):
        yield from module.modules() if module is not None else ()


def _is_plain(weight: Tensor) -> bool:
    """Whether oneDNN can read it: quantised and distributed weights are subclasses of `Parameter`, or of `Tensor`."""
    is_readable = weight.device.type == "cpu" and can_pack(weight.dtype)
    return is_readable and type(weight) is nn.Parameter and not weight.is_inference()
