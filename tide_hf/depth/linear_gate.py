"""Linear layers on a CPU that read their weights in the form that is the fastest (see `form_choice`).

A draft step does little else than read weights, and what it finds is verified. So it may read them in 7 bits, with a
scale for each 64 (compare LLM.int8(), arXiv 2208.07339), which no pass that verifies ever does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..base_model.structure import DecoderStructure
from ..common.errors import UnsupportedOptionError, describe
from ..kernels.cpu.compiled import VALUES
from ..kernels.cpu.form_choice import clearly_faster_form, fastest_form
from ..kernels.cpu.weight_forms import UNCOMPILED, RoundedWeight, StoredWeight, WeightForm, can_pack, in_form
from .gates import Gate, active_run

MEMORY_SHARE = 0.25  # of the free memory that copies of weights may fill

Forms = tuple[type[WeightForm], ...]

COMPILED: Forms = (StoredWeight, *UNCOMPILED)  # where kernels are compiled, or were
ROUNDED: Forms = (RoundedWeight, *COMPILED)  # where what is found is verified as well

Product = Callable[[Tensor], Tensor]

_forms: ContextVar[Forms] = ContextVar("tide_hf_forms", default=UNCOMPILED)
# By gate and values of the input; none where weights may change meanwhile, or somebody traces.
_products: ContextVar[dict[tuple[LinearGate, int], Product] | None] = ContextVar("tide_hf_products", default=None)


@contextmanager
def reading(forms: Forms, chosen_once: bool = False) -> Iterator[None]:
    """The forms in which linear layers with gates may read their weights; else in one that needs no compiler.

    Args:
        forms: They.
        chosen_once: Whether a layer may stay with what it chose for so many rows, since no weight changes: to ask once
            more took 9% of a pass over one token, 211 products in all.
    """
    forms_before, products_before = _forms.set(forms), _products.set({} if chosen_once else None)
    try:
        yield
    finally:
        _products.reset(products_before)
        _forms.reset(forms_before)


class LinearGate(Gate):
    """Stands in for the `forward` of one `nn.Linear`; it has weights in another form when it first has use for them.

    Args:
        linear: The layer.
        may_copy: Whether there may be copies of the weights.
        anywhere: Whether it is one of TIDE's own, which runs in nothing but TIDE's passes.
    """

    def __init__(self, linear: nn.Linear, may_copy: bool = True, anywhere: bool = False) -> None:
        super().__init__(linear)
        self._size, self.may_copy, self._anywhere = linear.in_features, may_copy, anywhere
        self.kept: dict[type[WeightForm], WeightForm] = {}

    def __call__(self, input: Tensor) -> Tensor:  # the name that nn.Linear gives it
        """Run the layer; natively outside TIDE's passes and for numbers of rows for which that is the fastest."""
        run = active_run()
        if run is None and not self._anywhere:
            return self.native(input)
        products = _products.get()
        if products is not None and run is not None and not torch.is_grad_enabled():
            product = products.get((self, input.numel()))
            if product is not None:
                return product(input)
        weight = self._weight
        if (
            weight is None
            or torch.is_grad_enabled()
            or input.dtype is not weight.dtype
            or torch.is_autocast_enabled("cpu")
            or not _is_plain(weight)
        ):
            return self.native(input)
        return self._choose(input, products)

    def _choose(self, input: Tensor, products: dict[tuple[LinearGate, int], Product] | None) -> Tensor:
        weight, bias = self._weight, self._bias
        kept = self.prepare(input.numel() // self._size, _forms.get())  # last, since it measures at first
        product: Product
        if kept is None:
            product = partial(functional.linear, weight=weight, bias=bias) if self.replaced is None else self.native
        elif type(input) is Tensor and not is_in_torch_dispatch_mode() and not torch.compiler.is_compiling():
            product = partial(kept.apply, bias=bias)  # an op takes microseconds more, 4% of a small model's pass
        else:
            return torch.ops.tide_hf.linear.default(input, weight, bias, kept.number)
        if products is not None:
            products[self, input.numel()] = product
        return product(input)

    def prepare(self, rows: int, forms: Forms) -> WeightForm | None:
        """Have the weights in the fastest of `forms` that they may have, for so many rows.

        Returns:
            They in that form; `None` where PyTorch's own linear is the fastest.
        """
        if not _is_plain(self._weight):  # moved to a GPU since, say
            return None
        if not self.may_copy:
            forms = tuple(form for form in forms if not form.is_copy)
        form = fastest_form(self._weight.dtype, rows, forms)
        return None if form is None else self.keep(form)

    def keep(self, form: type[WeightForm]) -> WeightForm:
        """Have the weights in a form."""
        kept, weight = self.kept.get(form), self._weight
        if kept is None or not kept.is_of(weight):
            self.kept[form] = kept = in_form(form, weight)
        return kept

    # A module's attributes take ten times as long to get, at every product of every pass.
    @property
    def _weight(self) -> Any:
        return self.module._parameters.get("weight")  # none where it is computed

    @property
    def _bias(self) -> Any:
        parameters = self.module._parameters
        if "bias" in parameters:
            return parameters["bias"]
        return self.module.bias

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have forms of their own weights."""
        return {**self.__dict__, "kept": {}}

    def release(self) -> None:
        """Give the memory of the other forms back."""
        self.kept = {}

    def release_if_changed(self) -> None:
        """Forget forms of weights that were replaced or written to, also by way of `.data`."""
        if not all(kept.is_of(self._weight, sampled=True) for kept in self.kept.values()):
            self.release()


class OneFormGate(LinearGate):
    """Stands in for the `forward` of one `nn.Linear` that reads one form in all passes, so that all compute alike."""

    def __init__(self, linear: nn.Linear, form: type[WeightForm]) -> None:
        super().__init__(linear, anywhere=True)
        self.form = form

    def prepare(self, rows: int, forms: Forms) -> WeightForm:
        """Have the weights in it, whatever the number of rows."""
        return self.keep(self.form)


@contextmanager
def faster_passes(structure: DecoderStructure) -> Iterator[None]:
    """Let a base model's own passes read weights in another form, on a CPU that is clearly faster with it.

    Where that is a copy, it is taken for that time, if it takes at most a quarter of the free memory.

    Args:
        structure: The base model's structure.
    """
    linears, may_copy = linears_to_gate(structure, "auto")
    forms = {linear: clearly_faster_form(linear.weight.dtype) for linear in linears}
    gates = [OneFormGate(linear, form) for linear, form in forms.items() if form and (may_copy or not form.is_copy)]
    try:
        for gate in gates:
            gate.open()
        yield
    finally:
        for gate in gates:
            gate.remove()


def linears_to_gate(structure: DecoderStructure, pack_weights: bool | str) -> tuple[list[nn.Linear], bool]:
    """The linear layers of the decoder and its head that may read their weights in another form.

    Args:
        structure: The base model's structure.
        pack_weights: Whether there may be copies of the weights: `True`; `False`, which leaves all layers as they are;
            or `"auto"`: where they take at most a quarter of the free memory.

    Returns:
        The layers, and whether there may be copies.

    Raises:
        UnsupportedOptionError: `True`, and the model or this build of PyTorch cannot.
    """
    if pack_weights is False:
        return [], False
    linears = linears_in(*_modules(structure))
    if pack_weights is True and not any(can_pack(linear.weight.dtype) for linear in linears):
        has_any = can_pack(torch.float32)
        raise UnsupportedOptionError(
            describe(
                "weights cannot be packed",
                got="no nn.Linear with such weights on the CPU" if has_any else "a PyTorch without oneDNN",
                expected="nn.Linear layers in float32 on a CPU, or in bfloat16 where oneDNN has it",
                do="Leave pack_weights at 'auto', or load the model with dtype=torch.float32 and no device_map.",
            )
        )
    return linears, pack_weights is True or copies_fit(linears)


def copies_fit(linears: Iterable[Any]) -> bool:
    """Whether a copy of the weights of linear layers takes at most a quarter of the free memory."""
    return sum(linear.weight.nbytes for linear in linears) <= psutil.virtual_memory().available * MEMORY_SHARE


def open_linear_gates(linears: list[nn.Linear], may_copy: bool, anywhere: bool = False) -> None:
    """Put a gate in front of each linear layer that has none; `may_copy` and `anywhere` as of [`LinearGate`]."""
    for linear in linears:
        if isinstance(linear.__dict__.get("forward"), LinearGate):  # of routers that two models share
            continue
        LinearGate(linear, may_copy, anywhere).open()


def linear_gates(structure: DecoderStructure, *others: nn.Module | None) -> Iterator[LinearGate]:
    """The gates that are in place in the decoder, its head and `others`, such as a block head."""
    for module in _modules(structure, *others):
        gate = module.__dict__.get("forward")
        if isinstance(gate, LinearGate):
            yield gate


def weight_dtypes(gates: Iterable[LinearGate]) -> set[torch.dtype]:
    """The dtypes of the weights behind gates; not of those that are computed."""
    return {weight.dtype for gate in gates if (weight := gate._weight) is not None}


def remove_linear_gates(structure: DecoderStructure, *others: nn.Module | None) -> None:
    """Take the gates away, and other forms of the weights with them."""
    for gate in list(linear_gates(structure, *others)):
        gate.remove()


def linears_in(*modules: nn.Module) -> list[nn.Linear]:
    """The linear layers among `modules` whose weights can be read in other forms.

    Those of other layers may not stay where they are; accelerate puts its own forward on what it moves.
    """
    kinds = (LinearGate, type(None))
    stay = [module for module in modules if isinstance(module.__dict__.get("forward"), kinds)]
    return [module for module in stay if type(module) is nn.Linear and _is_plain(module.weight)]


def _modules(structure: DecoderStructure, *others: nn.Module | None) -> Iterator[nn.Module]:
    for module in (*structure.layers, structure.head, *others):
        yield from module.modules() if module is not None else ()


def _is_plain(weight: Tensor) -> bool:
    """Whether all can read it: quantised and distributed weights are subclasses of `Parameter`, or of `Tensor`."""
    is_readable = weight.is_cpu and weight.dtype in VALUES
    return is_readable and type(weight) is nn.Parameter and not weight.is_inference()
