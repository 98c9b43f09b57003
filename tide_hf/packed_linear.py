"""Linear layers on a CPU whose weights are kept in another form: oneDNN's own layout, or for drafts 8 bits.

PyTorch's linear hands weights to MKL, or in bfloat16 to oneDNN, as they are stored. From a few rows on either copies
them into a layout of its own at every call, which costs a verify pass once more what a token costs; and there are CPUs
on which MKL reads them slowly even for one row. Weights that were copied once and kept cost neither. For which numbers
of rows that pays on this machine is measured at first use. Results differ from the plain call's by rounding, as those
of passes of another width do.

A draft step does little else than read weights, and what it finds is verified. So it may read them in 8 bits, with a
scale for each row (compare LLM.int8(), arXiv 2208.07339, section 2.1), which no pass that verifies ever does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import UnsupportedOptionError, describe
from .skipping import Gate, active_run
from .structure import DecoderStructure
from .timing import least_seconds

PROBED_ROWS = (1, 4, 16, 64, 256)  # what holds for one of them holds up to the next
PROBED_SIZE, PROBED_WEIGHTS = 1024, 16  # together more than a core's caches
REPEATS = 2
SAMPLED_WEIGHTS = 64
MEMORY_SHARE = 0.25  # of the free memory that copies of weights may fill
LARGEST_INT8 = 127
INT8_BLOCK = 16  # PyTorch's product reads beyond the end of rows that are no multiple of it


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
        rows = input.reshape(-1, input.shape[-1]).to(self._scales.dtype)
        output = torch._weight_int8pack_mm(rows, self._packed, self._scales).to(input.dtype)
        output = output.view(*input.shape[:-1], -1)
        return output if bias is None else output + bias

    def _take(self, weight: Tensor) -> None:
        largest = weight.abs().amax(dim=1).float().clamp_min(torch.finfo(torch.float32).tiny)
        self._scales = (largest / LARGEST_INT8).bfloat16()  # what the product is fast with, whatever the model's dtype
        rounded = (weight.float() / self._scales.float()[:, None]).round()
        self._packed = rounded.clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)


# By kind and addresses; models may share them.
_known: WeakValueDictionary[tuple[Any, ...], PackedWeight] = WeakValueDictionary()
_paying: dict[tuple[type[PackedWeight], torch.dtype, int], list[bool]] = {}  # by threads, for each of PROBED_ROWS
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
    key = kind, dtype, torch.get_num_threads()
    if key not in _paying:
        _paying[key] = [_is_faster(dtype, probed, kind) for probed in PROBED_ROWS] if _can_pack(dtype) else []
    at = sum(probed <= rows for probed in PROBED_ROWS) - 1
    return 0 <= at < len(_paying[key]) and _paying[key][at]


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
    known = _known.get(_key_of([weight], Int8Weight if int8 else PackedWeight))
    return functional.linear(input, weight, bias) if known is None else known.apply(input, bias)


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
        has_any = _can_pack(torch.float32)
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
    is_readable = weight.device.type == "cpu" and _can_pack(weight.dtype)
    return is_readable and type(weight) is nn.Parameter and not weight.is_inference()


@lru_cache
def _can_pack(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED_WEIGHTS)].clone()
