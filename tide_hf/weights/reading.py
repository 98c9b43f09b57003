"""How the weights of an attached model are read, decided in one place for eager calls, prompts and compiled steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from ..base_model.structure import DecoderStructure
from ..common.choices import EAGER
from ..kernels.cpu.cpp_kernels import CPU_DTYPES, are_ready, load_op
from ..routers.draft_head import DraftHead
from ..routers.routers import TIDERouters
from .fused_head import FusedHead, fused_head
from .fused_layers import FusedLayer, FusedLayers
from .fused_passes import SPARE_SLOTS, FusedPasses
from .layouts import (
    DECODE_ROWS,
    PYTORCH_LAYOUTS,
    Layouts,
    PlainWeight,
    QuantizedWeight,
    WeightLayout,
    fastest_layout,
)
from .linear_gate import (
    DRAFT_LAYOUTS,
    KERNEL_LAYOUTS,
    PROMPT_LAYOUTS,
    VERIFY_LAYOUTS,
    IntegerGate,
    LinearGate,
    allowed_layouts,
    copies_fit,
    has_plain_weight,
    layouts_now,
    linears_in,
    linears_to_gate,
    release_changed,
    weight_dtypes,
)
from .upcast import UpcastGate, modules_to_upcast, upcasts

ALIKE_ROWS = 16  # of a batch, up to which its sums do not depend on the width of a pass


class WeightReading:
    """Decides how the linear layers of one model and of its draft head read their weights.

    Args:
        structure: The model.
        routers: Its routers; their draft head may be replaced.
        pack_weights: As in `TIDEModelForCausalLM.from_pretrained`.
        use_kernels: As there; of interest to eager calls alone.
    """

    def __init__(
        self,
        structure: DecoderStructure,
        routers: TIDERouters | None,
        pack_weights: bool | str = "auto",
        use_kernels: bool | str = "auto",
    ) -> None:
        self.structure, self.routers, self.use_kernels = structure, routers, use_kernels
        linears, self._may_copy = linears_to_gate(structure, pack_weights)
        self.has_gates = bool(linears)
        self._upcast: list[UpcastGate] = []
        self.copies_at_once = pack_weights is True  # whether even the first short answer may copy weights
        self._num_decoded = 0.0  # tokens per row that all calls have decoded
        self.fused_layers = FusedLayers(structure)

    def open(self, model: nn.Module) -> None:
        """Install a gate on each linear layer of the model and of the draft head, and where the model upcasts."""
        self._open(*self.structure.layers, self.structure.head, anywhere=False)
        self.open_for(*self._draft_heads)
        modules = modules_to_upcast(model, [gate.module for gate in self.gates()]) if self.has_gates else []
        self._upcast = [UpcastGate(module) for module in modules if "forward" not in module.__dict__]
        for upcast in self._upcast:
            upcast.open()

    def open_for(self, *own: nn.Module) -> None:
        """Install gates on the linear layers of modules of TIDE's own, if those of the model have some."""
        self._open(*own, anywhere=True)

    def _open(self, *modules: nn.Module, anywhere: bool) -> None:
        for linear in linears_in(*modules) if self.has_gates else ():
            if isinstance(linear.__dict__.get("forward"), LinearGate):  # routers may be shared by two models
                continue
            has_plain = has_plain_weight(linear)
            gate = LinearGate(linear, self._may_copy, anywhere) if has_plain else IntegerGate(linear, self._may_copy)
            gate.open()

    @property
    def _draft_heads(self) -> list[DraftHead]:
        head = self.routers.draft_head if self.routers is not None else None
        return [] if head is None else [head]

    def remove(self) -> None:
        """Remove the gates."""
        for gate in (*self.gates(), *self._upcast):
            gate.remove()
        self._upcast = []

    def release(self) -> None:
        """Free the converted weights."""
        self.fused_layers.forget()
        for gate in self.gates():
            gate.release()
        for upcast in self._upcast:
            upcast.release()

    def gates(self, *others: nn.Module) -> list[LinearGate]:
        """The gates on linear layers of the model, of the draft head and of `others`."""
        parts = (*self.structure.layers, self.structure.head, *self._draft_heads, *others)
        forwards = [module.__dict__.get("forward") for part in parts for module in part.modules()]
        return [forward for forward in forwards if isinstance(forward, LinearGate)]

    @contextmanager
    def in_call(self, engine: str, max_new_tokens: int) -> Iterator[None]:
        """The context in which a call on `engine` is decoded; half of `max_new_tokens` are expected.

        No weight may change in it. Those that have changed since the last call are converted anew.
        """
        gates = self.gates()
        release_changed(gates)
        layouts = self._eager_layouts(gates)
        if engine == EAGER and not self.copies_at_once:  # compiled graphs keep the layouts that they were traced with
            decoded = self._num_decoded + max_new_tokens / 2
            layouts = tuple(layout for layout in layouts if layout.pays_after <= decoded)
        with allowed_layouts(layouts, cache_choice=True):
            yield

    @contextmanager
    def in_decode(self, rows: int) -> Iterator[bool]:
        """The context of a call's passes after its prompts, within [`WeightReading.in_call`].

        Yields whether what follows holds.

        Where kernels are at hand, sums have one order in passes of any width, so that drafts change no logits. Batches
        of more than `ALIKE_ROWS` rows, which hardly draft, read what is the fastest.
        """
        layouts = tuple(layout for layout in layouts_now() if layout.sums_alike)
        if not layouts or rows > ALIKE_ROWS:
            yield False
        else:
            with allowed_layouts(layouts, cache_choice=True):
                yield True

    def in_measurement(self) -> AbstractContextManager[None]:
        """The context in which passes are measured that verify drafts."""
        return allowed_layouts(VERIFY_LAYOUTS, cache_choice=True)

    @contextmanager
    def forgetting_copies(self) -> Iterator[None]:
        """The context of passes that no call has asked for: copies of weights that are made in it do not stay."""
        kept = {gate: dict(gate.converted) for gate in self.gates()}
        try:
            yield
        finally:
            self.fused_layers.forget()
            for gate, converted in kept.items():
                gate.keep(converted)

    def add_decoded(self, tokens_per_row: float) -> None:
        """Count what a call has decoded, since copies of weights pay only after some tokens."""
        self._num_decoded += tokens_per_row

    def in_short_prompt(self) -> AbstractContextManager[None]:
        """The context of a prompt whose layers a kernel runs; it may have been built since the call began."""
        return allowed_layouts(KERNEL_LAYOUTS)

    def in_compiled_prompt(self) -> AbstractContextManager[None]:
        """The context of a prompt whose layers are compiled."""
        return allowed_layouts(PROMPT_LAYOUTS)

    def execute_layer(self, num_layers: int | None = None, spare_slots: int = SPARE_SLOTS) -> FusedPasses | None:
        """What runs decoder layers in an eager call, where that is not their own forward; see [`FusedPasses`].

        With `num_layers`, only the first ones.
        """
        found = {} if self.use_kernels is False else self.fused_layers.with_limits(num_layers)
        return FusedPasses(self.fused_layers, found, spare_slots) if found else None

    def fused_head(self, head: DraftHead) -> FusedHead | None:
        """What runs the draft head in the eager calls of a single row, where that is not the head itself."""
        if self.use_kernels is False:
            return None
        pays = any(one.is_copy and one.pays_after >= QuantizedWeight.pays_after for one in layouts_now())
        may_copy = self._may_copy and pays  # as other copies that pay no sooner
        return fused_head(head, QuantizedWeight if may_copy else PlainWeight)

    def measure(self) -> None:
        """Measure what decodes the fastest on this machine, so that no call has to wait for it."""
        gates = self.gates()
        for dtype in weight_dtypes(gates):
            now = torch.float32 if upcasts() else dtype
            fastest_layout(now, DECODE_ROWS[0], self._eager_layouts(gates), dtype)
        self.execute_layer()  # probes and times the layers, which it remembers

    def convert(self) -> bool:
        """Convert the weights to what the kernels read the fastest, so that no later call has to; return if any was."""
        gates = self.gates()
        if self._eager_layouts(gates) is not KERNEL_LAYOUTS:
            return False
        self.copies_at_once = True
        before = [len(gate.converted) for gate in gates]
        release_changed(gates)
        for gate in gates:
            gate.prepare(DECODE_ROWS[0], VERIFY_LAYOUTS, torch.float32 if upcasts() else None)
        return before != [len(gate.converted) for gate in gates]

    def missing_kernels(self, may_upcast: bool = False) -> list[torch.dtype]:
        """The dtypes whose kernels eager calls lack, of which `may_upcast` says that some compute in float32."""
        dtypes = weight_dtypes(self.gates()) & CPU_DTYPES.keys() if self.use_kernels is not False else set()
        if dtypes and may_upcast:
            dtypes.add(torch.float32)
        return [dtype for dtype in CPU_DTYPES if dtype in dtypes and not are_ready(dtype)]

    def can_have_kernels(self) -> bool:
        """Whether there are kernels that multiply by the model's weights; they are built, unless they are there."""
        return all(load_op("skinny_gemm", dtype) is not None for dtype in _dtypes_of(self.gates()))

    def small_copies(self) -> dict[tuple[UpcastGate, str], Tensor]:
        """The float32 copies of small parameters, as they are now."""
        gates = (*self._upcast, *(gate.upcast for gate in self.gates()))
        return {(gate, name): gate.float32(name) for gate in gates for name in gate.copies}

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights that can be converted."""
        return sum(gate.num_bytes for gate in self.gates())

    def _eager_layouts(self, gates: list[LinearGate]) -> Layouts:
        """The layouts that eager calls may read; those of kernels only if the kernels are compiled already."""
        may_use_kernels = self.use_kernels is not False and all(map(are_ready, _dtypes_of(gates)))
        return KERNEL_LAYOUTS if may_use_kernels else PYTORCH_LAYOUTS


def _dtypes_of(gates: list[LinearGate]) -> set[torch.dtype]:
    """The dtypes of the inputs of linear layers."""
    return weight_dtypes(gates) | ({torch.float32} if upcasts() else set())


class StepReading:
    """Decides how the compiled steps of a model read its weights and those of `others`, and knows which they have read.

    It lasts from the first step until all steps are freed.
    """

    def __init__(self, weights: WeightReading, *others: nn.Module) -> None:
        self._fused_layers, self._gates, self._weights = weights.fused_layers, weights.gates(*others), weights
        # Checked before the first step only, whose copies then take memory.
        self._may_copy = all(gate.may_copy for gate in self._gates) and copies_fit(gate.module for gate in self._gates)
        self._read: dict[tuple[LinearGate, type[WeightLayout]], WeightLayout] = {}
        self._copies: dict[tuple[UpcastGate, str], Tensor] = {}  # of small parameters

    def is_current(self) -> bool:
        """Whether no weight that steps have read has been converted anew."""
        copies = self._weights.small_copies()
        are_same = all(copies.get(key) is copy for key, copy in self._copies.items())
        return are_same and all(gate.converted.get(layout) is found for (gate, layout), found in self._read.items())

    @contextmanager
    def in_step(self, kind: str, rows: int, width: int) -> Iterator[tuple[dict[int, FusedLayer], bool]]:
        """The context in which a step over rows of `width` tokens is compiled; its kind is as in `StepStore.run`.

        Yields the layers that kernels run, by index, and whether memory allows a copy of the weights.
        """
        layouts = DRAFT_LAYOUTS if kind == "draft" and self._may_copy else KERNEL_LAYOUTS
        may_fuse = kind in ("verify", "segment")  # drafts read quantised weights
        if may_fuse and rows <= ALIKE_ROWS and self._weights.can_have_kernels():
            layouts = VERIFY_LAYOUTS
        with allowed_layouts(layouts):
            yield self._fused_layers.for_tokens(rows * width) if may_fuse else {}, self._may_copy
        self._read = {(gate, layout): found for gate in self._gates for layout, found in gate.converted.items()}
        self._copies = self._weights.small_copies()
