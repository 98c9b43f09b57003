"""Linear layers on a CPU that read their weights in the fastest layout (see `layouts`).

Reading weights takes most of the time of a draft step, and drafted tokens are verified. Draft steps may therefore read
quantised weights (compare LLM.int8(), arXiv 2208.07339); verify passes never do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from ..base_model.structure import DecoderStructure
from ..base_model.unembed import addresses_of
from ..common.errors import UnsupportedOptionError
from ..common.memory import copy_if_it_fits, free_host_memory
from ..depth.gates import ACTIVE_RUN, Gate
from ..kernels.cpu.cpp_kernels import CPU_DTYPES
from .integers import IntegerWeight, PanelIntegers, integers_of
from .layouts import (
    PYTORCH_LAYOUTS,
    Layouts,
    PlainWeight,
    QuantizedWeight,
    WeightLayout,
    can_pack,
    clearly_faster_layout,
    fastest_layout,
    hold_samples,
    in_layout,
    sum_alike,
    version_of,
)
from .lossless import HalfWeight, RequantizedWeight
from .panels import LayoutError
from .upcast import HALF, UpcastGate, upcasts

MEMORY_SHARE = 0.25  # maximum share of the free memory that copies of weights may take

LOSSLESS_LAYOUTS: Layouts = (RequantizedWeight, HalfWeight, PanelIntegers)  # copies that hold the same values
PROMPT_LAYOUTS: Layouts = (PlainWeight, *PYTORCH_LAYOUTS)  # if compiled kernels may run, for any number of rows
VERIFY_LAYOUTS: Layouts = (*LOSSLESS_LAYOUTS, PlainWeight)  # which sum alike in passes of any width
KERNEL_LAYOUTS: Layouts = (*LOSSLESS_LAYOUTS, *PROMPT_LAYOUTS)
DRAFT_LAYOUTS: Layouts = (QuantizedWeight, *KERNEL_LAYOUTS)  # for passes whose tokens are verified

Multiply = Callable[[Tensor], Tensor]

_layouts: ContextVar[Layouts] = ContextVar("tide_hf_layouts", default=PYTORCH_LAYOUTS)
# The chosen product function for each gate and input size; `None` while weights may change or a graph is traced.
_products: ContextVar[dict[tuple[LinearGate, int], Multiply] | None] = ContextVar("tide_hf_products", default=None)


def layouts_now() -> Layouts:
    """The layouts in which gated linear layers may read their weights now."""
    return _layouts.get()


@contextmanager
def allowed_layouts(layouts: Layouts, cache_choice: bool = False) -> Iterator[None]:
    """Set the layouts in which gated linear layers may read their weights. The default layouts need no compiler.

    With `cache_choice`, which requires that no weight changes meanwhile, a layer stores its choice per input size:
    choosing anew at each product took 9% of a pass over one token (211 products).
    """
    layouts_before, products_before = _layouts.set(layouts), _products.set({} if cache_choice else None)
    try:
        yield
    finally:
        _products.reset(products_before)
        _layouts.reset(layouts_before)


class LinearGate(Gate):
    """Replaces the `forward` of one `nn.Linear`; weights are converted to another layout at first use.

    With `anywhere`, for TIDE's own layers, the gate also acts outside an active run.
    """

    def __init__(self, linear: nn.Linear, may_copy: bool = True, anywhere: bool = False) -> None:
        super().__init__(linear)
        self._size, self.may_copy, self._anywhere = linear.in_features, may_copy, anywhere
        self.converted: dict[type[WeightLayout], WeightLayout] = {}
        # The version of the weight that could not be converted to a layout.
        self._refused: dict[type[WeightLayout], tuple[int, int]] = {}
        self.upcast = UpcastGate(linear)  # of which no more than its copies are used

    def __call__(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        """Run the layer in the fastest layout; outside TIDE's passes, run its own `forward`."""
        # `active_run()` inlined, since the call would cost time at each product of a pass.
        run = None if torch.compiler.is_dynamo_compiling() else ACTIVE_RUN.get()
        if run is None and not (self._anywhere or upcasts()):
            return self.native(input)
        products = _products.get()
        if products is not None and run is not None and not torch.is_grad_enabled():
            product = products.get((self, input.numel()))
            if product is not None:
                return product(input)
        if (
            torch.is_grad_enabled()
            or not self.sources()
            or not (input.dtype is self._weight.dtype or (input.dtype is torch.float32 and self._weight.dtype in HALF))
            or torch.is_autocast_enabled("cpu")
        ):
            return self.native(input)
        return self._choose(input, products)

    def sources(self) -> tuple[Tensor, ...]:
        """The weight (out, in), which layouts are made from; nothing while it cannot be read in other layouts."""
        weight = self._weight  # for example, moved to a GPU after attaching
        return (weight,) if weight is not None and _is_plain(weight) else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of what layouts are made from."""
        return sum(source.nbytes for source in self.sources())

    def _choose(self, input: Tensor, products: dict[tuple[LinearGate, int], Multiply] | None) -> Tensor:
        weight, bias, is_traced = self._weight, self._bias, is_in_torch_dispatch_mode()
        with _disable_current_modes() if is_traced else nullcontext():  # no trace shall convert weights, or measure
            converted = self.prepare(input.numel() // self._size, _layouts.get(), input.dtype)
            if bias is not None and bias.dtype is not input.dtype:
                bias = self.upcast.float32("bias")
        product: Multiply
        if converted is None:
            has_own = self.replaced is not None or not _is_plain(weight)
            product = self.native if has_own else partial(functional.linear, weight=weight, bias=bias)
        elif converted.is_traceable or (type(input) is Tensor and not is_traced and not torch.compiler.is_compiling()):
            # Dispatching an op takes microseconds, 4% of a small model's pass.
            product = partial(converted.apply, bias=bias)
        else:
            return torch.ops.tide_hf.linear.default(input, [weight], bias, converted.number)
        if products is not None:
            products[self, input.numel()] = product
        return product(input)

    def prepare(self, rows: int, layouts: Layouts, dtype: torch.dtype | None = None) -> WeightLayout | None:
        """Convert the weights to the fastest of `layouts` for a number of rows; `None` if PyTorch's own is faster.

        The input is of `dtype`, by default that of the weight.
        """
        if not self.sources():
            return None
        version = version_of(self._weight)
        layouts = tuple(
            layout
            for layout in layouts
            if (self.may_copy or not layout.is_copy) and self._refused.get(layout) != version
        )
        layout = fastest_layout(dtype or self._weight.dtype, rows, layouts, self._weight.dtype)
        return None if layout is None else self.convert(layout) or self.prepare(rows, layouts, dtype)

    def convert(self, layout: type[WeightLayout]) -> WeightLayout | None:
        """Return the weights in a layout, converted at first use and again after they have changed.

        Returns `None`, until they change, if the layout lacks some of their values, or there is no memory for a copy.
        """
        converted, sources = self.converted.get(layout), self.sources()
        if converted is not None and converted.is_of(*sources):
            return converted
        version = version_of(sources[0])
        if self._refused.get(layout) == version:
            return None
        try:
            converted = copy_if_it_fits(partial(in_layout, layout, *sources), self.num_bytes if layout.is_copy else 0)
        except LayoutError:
            converted = None
        if converted is None:
            self._refused[layout] = version
        else:
            self.converted[layout] = converted
        return converted

    # These lookups run at every product, and are ten times faster in `_parameters` than as attributes of a module.
    @property
    def _weight(self) -> Any:
        return self.module._parameters.get("weight")  # `None` if the weight is computed (parametrised)

    @property
    def _bias(self) -> Any:
        parameters = self.module._parameters
        if "bias" in parameters:
            return parameters["bias"]
        return self.module.bias

    def __getstate__(self) -> dict[str, Any]:
        """Leave converted weights out of copies and pickles; a copy converts its own weights."""
        return {**self.__dict__, "converted": {}, "_refused": {}}

    def release(self) -> None:
        """Free the converted weights."""
        self.converted, self._refused = {}, {}
        self.upcast.release()

    def keep(self, converted: dict[type[WeightLayout], WeightLayout]) -> None:
        """Free all converted weights but these."""
        self.converted = converted

    def release_if_changed(self, sampled: bool = True) -> None:
        """Free converted weights whose source was replaced or written to, if `sampled` including through `.data`."""
        sources = self.sources()
        if not sources or not all(weight.is_of(*sources, sampled=sampled) for weight in self.converted.values()):
            self.release()


class IntegerGate(LinearGate):
    """Replaces the `forward` of one linear layer whose weight is quantised to integers (see `integers`)."""

    def __init__(self, linear: nn.Linear, may_copy: bool = True) -> None:
        super().__init__(linear, may_copy)
        # A weight, the addresses of the tensors in it, and its integers, which take time to find.
        self._found: tuple[Any, tuple[int, ...], tuple[Tensor, ...]] = (None, (), ())

    def sources(self) -> tuple[Tensor, ...]:
        """The integers, their scales and perhaps zero points, as the kernel reads them; nothing while it cannot."""
        weight, addresses = self._weight, addresses_of(self._weight)
        if self._found[0] is not weight or self._found[1] != addresses:
            self._found = weight, addresses, integers_of(self.module) or ()
        return self._found[2]

    def prepare(self, rows: int, layouts: Layouts, dtype: torch.dtype | None = None) -> WeightLayout | None:
        """The weights as the kernel reads them; `None` if it may not run, or the package's own product is faster."""
        sources, own = self.sources() if PlainWeight in layouts else (), self._weight.dtype
        if sum_alike(layouts) or dtype not in (None, own):  # the package's own product sums, or computes, otherwise
            rows = 1
        dtype = dtype or own
        if not sources or not IntegerWeight.serves(dtype, rows, sources[0].dtype):
            return None
        takes_copy = self.may_copy and PanelIntegers in layouts and PanelIntegers.serves(dtype, rows, sources[0].dtype)
        return (self.convert(PanelIntegers) if takes_copy else None) or self.convert(IntegerWeight)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the integers as well; a copy finds its own."""
        return {**super().__getstate__(), "_found": (None, (), ())}


class SingleLayoutGate(LinearGate):
    """Replaces the `forward` of one `nn.Linear`; reads one layout in all passes, so that all passes round alike."""

    def __init__(self, linear: nn.Linear, layout: type[WeightLayout]) -> None:
        super().__init__(linear, anywhere=True)
        self.layout = layout

    def prepare(self, rows: int, layouts: Layouts, dtype: torch.dtype | None = None) -> WeightLayout | None:
        """Convert the weights to the gate's layout, whatever the number of rows; `None` if memory has no room."""
        return self.convert(self.layout)


def release_changed(gates: Sequence[LinearGate]) -> None:
    """Free the converted weights whose sources were replaced or written to, including through `.data`."""
    for gate in gates:
        gate.release_if_changed(sampled=False)
    if not hold_samples(layout for gate in gates for layout in gate.converted.values()):
        for gate in gates:
            gate.release_if_changed()


@contextmanager
def faster_passes(structure: DecoderStructure) -> Iterator[None]:
    """Let a base model's own passes read another weight layout, if this layout is clearly faster on this CPU.

    A layout that copies the weights is used only if the copy takes at most a quarter of the free memory.
    """
    linears, may_copy = linears_to_gate(structure, "auto")
    gates = [
        SingleLayoutGate(linear, layout)
        for linear in filter(has_plain_weight, linears)
        if (layout := clearly_faster_layout(linear.weight.dtype)) and (may_copy or not layout.is_copy)
    ]
    try:
        for gate in gates:
            gate.open()
        yield
    finally:
        for gate in gates:
            gate.remove()


def linears_to_gate(structure: DecoderStructure, pack_weights: bool | str) -> tuple[list[nn.Linear], bool]:
    """Find the linear layers of the decoder and its head to gate, and whether their weights may be copied.

    `pack_weights` is `True`, `False` (no layer is gated), or `"auto"` (copies only if they fit into memory).
    """
    if pack_weights is False:
        return [], False
    linears = linears_in(*structure.layers, structure.head)
    if pack_weights is True and not packable(linears):
        has_any = can_pack(torch.float32)
        raise UnsupportedOptionError(
            "weights cannot be packed",
            got="no nn.Linear with such weights on the CPU" if has_any else "a PyTorch without oneDNN",
            expected="nn.Linear layers in float32 on a CPU, or in bfloat16 where oneDNN has it",
            do="Leave pack_weights at 'auto', or load the model with dtype=torch.float32 and no device_map.",
        )
    return linears, pack_weights is True or copies_fit(linears)


def packable(linears: Iterable[nn.Linear]) -> list[nn.Linear]:
    """Those of the layers whose weights can be prepacked."""
    return [linear for linear in linears if has_plain_weight(linear) and can_pack(linear.weight.dtype)]


def copies_fit(linears: Iterable[Any]) -> bool:
    """Whether all copies of the layers' plain weights take at most a quarter of the free memory."""
    weights = [linear.weight for linear in linears if has_plain_weight(linear)]
    needed = sum(weight.nbytes * (1.5 if weight.dtype is torch.float32 else 1.0) for weight in weights)
    return needed <= free_host_memory() * MEMORY_SHARE


def weight_dtypes(gates: Iterable[LinearGate]) -> set[torch.dtype]:
    """The dtypes of gated weights, except those of parametrised weights."""
    return {weight.dtype for gate in gates if (weight := gate._weight) is not None}


def linears_in(*parts: nn.Module) -> list[nn.Linear]:
    """The linear layers in `parts` whose weights can be read in other layouts, or as integers."""
    kinds = (LinearGate, type(None))  # accelerate replaces the forward of layers with offloaded weights
    linears = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    gateable = [linear for linear in linears if isinstance(linear.__dict__.get("forward"), kinds)]
    return [linear for linear in gateable if has_plain_weight(linear) or integers_of(linear) is not None]


def has_plain_weight(linear: nn.Linear) -> bool:
    """Whether a layer's weight can be read in other layouts; else it may be quantised."""
    return type(linear) is nn.Linear and _is_plain(linear.weight)


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is a plain CPU parameter of a supported dtype, not a subclass (quantised or distributed)."""
    is_readable = weight.is_cpu and weight.dtype in CPU_DTYPES
    return is_readable and type(weight) is nn.Parameter and not weight.is_inference()
