"""The steps of one model, prepared at first use and kept between calls: compiled, and on GPUs captured as well."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers.cache_utils import Cache

from ...base_model.unembed import addresses_of
from ...common.memory import free_host_memory
from ...kernels.flash_decode import can_flash_decode
from ...weights.reading import StepReading
from ..gqa_attention import attention_of, gqa_attention, reading_lengths
from ..warm_up import WarmUp
from .capture import Replay, capturable_forward, capture
from .graphs import CompileGraph, compile_graph
from .static_cache import FilledCache, static_cache_bytes
from .step_buffers import FIRST_SLOTS, StepBuffers, capacity_for, slots_for_now
from .step_compiler import CompiledPrefill, StepCompiler
from .step_tensors import WIDEST, WIDTHS, BufferKind, ModelParts

MEMORY_SHARE = 0.5  # maximum share of the free memory that a call's buffers may take
MAX_GRAPHS = 64
MAX_BUFFERS = 8  # each for one number of rows and slots
SETTING_TYPES = (bool, float, str)  # of modules; an int may count calls, and an object may be set lazily
NO_SETTINGS = {dict, OrderedDict, set, int, type(None)}  # what most attributes are

logger = logging.getLogger(__name__)


class Step:
    """A prepared step."""

    replay: Replay
    num_layers: int = 0  # layers that the step executes, counted once per row
    # Of a verify pass (rows, width, vocabulary), of the draft head (rows, draft vocabulary); the next step overwrites.
    logits: Any = None


class StepStore:
    """The steps of one model. One call at a time can use them; subclasses decide how steps are prepared.

    `compile_graph` compiles a graph, given its inputs; if it is `None`, steps stay uncompiled.
    """

    kind: str  # what prepared steps are called in log messages
    widths: tuple[int, ...] = WIDTHS  # of verify passes
    reads_drafts: bool  # whether the host reads each draft token and its score before the next draft step
    grows: bool  # whether buffers grow with every answer, and smaller ones are kept for shorter calls
    reads_lengths = False  # whether attention may read the number of filled slots on the device
    prompts: CompiledPrefill | None = None  # runs the layers of prefill compiled, where that is faster

    def __init__(self, compile_graph: CompileGraph | None, description: str) -> None:
        self._compile_graph = compile_graph
        self.warm_up = WarmUp(description, "steps")  # `warm_up.bytes` includes buffers
        self.reads, self.replays = 0, 0  # numbers of host synchronisations, and of steps run
        self.lock = Lock()  # held by the call that uses the steps
        self._ended: tuple[torch.device, Any] | None = None  # the GPU of the last call, and an event after all its work
        self._free()

    def hold(self) -> bool:
        """Let a call use the steps until it calls `let_go`, unless another call does; return whether it may.

        Its work on a GPU comes after that of the last call, such as a pass that has run ahead in vain, on any stream.
        """
        if not self.lock.acquire(blocking=False):
            return False
        if self._ended is not None:
            device, event = self._ended
            torch.cuda.current_stream(device).wait_event(event)
        return True

    def let_go(self, device: torch.device) -> None:
        """End what `hold` began, for a call on `device`."""
        try:
            if device.type == "cuda":
                self._ended = device, torch.cuda.current_stream(device).record_event()
        finally:
            self.lock.release()
            self._free_if_released()

    def release(self) -> None:
        """Free buffers and graphs; if a call uses them, at its end."""
        self._is_released = True
        self._free_if_released()

    def _free_if_released(self) -> None:
        while self._is_released and self.lock.acquire(blocking=False):  # again, if it is released meanwhile
            try:
                self._free()
            finally:
                self.lock.release()

    def _free(self) -> None:
        self._is_released = False
        self._buffers: OrderedDict[tuple, StepBuffers] = OrderedDict()
        self._steps: OrderedDict[tuple[StepBuffers, str, Any], Step] = OrderedDict()
        self._fingerprint: tuple = ()
        self._parts: ModelParts | None = None
        self.refused: str | None = None  # why the model's steps cannot be prepared
        self.compiler = StepCompiler(self._compile_graph) if self._compile_graph is not None else None

    def refresh(self, parts: Callable[[], ModelParts]) -> None:
        """Begin a call: drop the graphs if the model has changed since the last call.

        Steps whose capture ran out of memory are prepared again. `parts` returns the parts of the model that steps run.
        """
        for key in [key for key, step in self._steps.items() if step.replay.may_do_later]:
            del self._steps[key]
        found = self._parts or parts()
        if (fingerprint := fingerprint_of(found)) != self._fingerprint:
            found = found if self._parts is None else parts()
            self._free()
            if self.compiler is not None:
                found = replace(found, execute_layer=self.compiler.run)
            self._parts, self._fingerprint = found, fingerprint

    def slots_for(self, like: FilledCache, rows: int, most: int, kind: BufferKind) -> int:
        """Number of slots that a call should have by now; it may later need `most`, and then more buffers."""
        raise NotImplementedError

    def buffers(self, like: FilledCache, rows: int, slots: int, kind: BufferKind) -> StepBuffers:
        """Buffers of at least `slots` slots and `rows` rows; call `refresh` first.

        Existing buffers of less than twice as many rows are reused, and of up to twice as many slots, or of any number
        where unfilled slots take no time: unused ones cost less than preparing further steps. `like` is the filled
        cache of the call. Buffers whose cache it is go if it is spare and others are allocated.
        """
        first: Any = like.cache.layers[0]
        key, alike = self._key_of(like, rows, slots, kind)
        if key not in self._buffers:
            for old in [old for old, found in self._buffers.items() if like.is_spare and found.cache is like.cache]:
                self._drop(old)
            before = reserved_bytes(first.keys.device)
            shared = next((self._buffers[other].cache for other in alike if other[1] == key[1]), None)
            parts: Any = self._parts
            self._buffers[key] = StepBuffers(parts, like, rows, key[1], kind, shared)
            self.warm_up.add(0, 0.0, reserved_bytes(first.keys.device) - before)
            while len(self._buffers) > MAX_BUFFERS:
                self._drop(next(iter(self._buffers)))
        self._buffers.move_to_end(key)
        return self._buffers[key]

    def _drop(self, key: tuple) -> None:
        """Free buffers and their steps."""
        buffers = self._buffers.pop(key)
        for step in [step for step in self._steps if step[0] is buffers]:
            del self._steps[step]

    def fits(self, like: FilledCache, rows: int, slots: int, kind: BufferKind) -> bool:
        """Whether [`buffers`] can reuse or allocate memory for K/V with these arguments."""
        (_, capacity, *_), alike = self._key_of(like, rows, slots, kind)
        return any(other[1] == capacity for other in alike) or self._can_allocate(like, rows, capacity)

    def _can_allocate(self, like: FilledCache, rows: int, capacity: int) -> bool:
        first: Any = like.cache.layers[0]
        free = free_memory(first.keys.device) + like.is_spare * like.num_bytes
        return static_cache_bytes(like, rows, capacity) <= MEMORY_SHARE * free

    def _key_of(self, like: FilledCache, rows: int, slots: int, kind: BufferKind) -> tuple[tuple, list[tuple]]:
        """The key of the buffers to reuse or allocate, and the keys of all existing buffers that are large enough."""
        first: Any = like.cache.layers[0]
        are_free, capacity = can_read_length(kind, like.cache), capacity_for(rows, slots)
        if are_free and self._can_allocate(like, rows, larger := capacity_for(rows, slots, are_free=True)):
            capacity = larger
        others = (first.keys.dtype, len(like.cache.layers), kind)
        alike = [key for key in self._buffers if key[2:] == others and key[0] >= rows and key[1] >= capacity]
        near = [key for key in alike if key[0] < 2 * rows and (are_free or key[1] <= 2 * capacity)]
        return min(near, default=(rows, capacity, *others)), alike

    def smaller(self, buffers: StepBuffers, rows: int) -> StepBuffers | None:
        """Find buffers with fewer rows, at least `rows`, that have all the steps that `buffers` have."""
        kind = next((key[1:] for key, found in self._buffers.items() if found is buffers), None)
        steps = self._steps_of(buffers)
        for key in sorted(key for key in self._buffers if key[1:] == kind and rows <= key[0] < buffers.rows):
            if steps <= self._steps_of(self._buffers[key]):
                self._buffers.move_to_end(key)
                return self._buffers[key]
        return None

    def _steps_of(self, buffers: StepBuffers) -> set[tuple[str, Any]]:
        return {(kind, size) for found, kind, size in self._steps if found is buffers}

    def run(self, buffers: StepBuffers, kind: str, size: Any) -> Step:
        """Run a step, prepared at first use.

        That is `("verify", width)` or `("draft", exit_layer)`, or one of [`ExitSteps`].
        """
        key = (buffers, kind, size)
        if key not in self._steps:
            while len(self._steps) >= MAX_GRAPHS:
                self._steps.popitem(last=False)
            self._steps[key] = self._prepare(buffers, kind, size)
        self._steps.move_to_end(key)
        step = self._steps[key]
        step.logits = step.replay.run()
        self.replays += 1
        return step

    def advance(self, buffers: StepBuffers) -> None:
        """Let the next step go on after what the last pass accepts, without the host; see `StepBuffers.advance`."""
        raise NotImplementedError

    def read(self, buffers: StepBuffers, before_waiting: Callable[[], None] | None = None) -> list[list[int]]:
        """Wait for the steps' results and return them; see `StepTensors.read`."""
        self.reads += 1
        return buffers.tensors.read(before_waiting)

    def _prepare(self, buffers: StepBuffers, kind: str, size: Any) -> Step:
        step = Step()
        method: Any = getattr(buffers, kind, None) or getattr(buffers.exits, kind)
        width = size if kind == "verify" else getattr(size, "width", 1)

        def function() -> Any:
            step.num_layers, logits = method(size)
            return logits

        start, before = perf_counter(), reserved_bytes(buffers.device)
        step.replay = replay = self._replay_of(function, buffers, kind, buffers.rows * width)
        name = type(buffers.parts.model).__name__
        if replay.may_do_later:
            logger.warning("%s runs some steps without %s: %s", name, self.kind, replay.refused)
        elif replay.refused is not None and self.refused is None:
            self.refused = replay.refused
            logger.warning("%s runs without %s: %s", name, self.kind, self.refused)
        seconds, used = perf_counter() - start, reserved_bytes(buffers.device) - before
        self.warm_up.add(1, seconds, used)
        where = f"{kind} step, {size}, {buffers.rows} x {buffers.capacity}"
        logger.info("step %d (%s slots): %.2f s, %.0f MB", self.warm_up.num_prepared, where, seconds, used / 1e6)
        return step

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        """Prepare a step that processes `tokens` tokens, counted over all rows."""
        raise NotImplementedError


class CompiledSteps(StepStore):
    """The steps of one model on a CPU, compiled."""

    kind = "compiled steps"
    reads_drafts = True  # on a CPU, reading costs nothing
    grows = True  # a few sizes serve all calls; unfilled slots would cost memory and mask computation

    def __init__(self, compile_graph: CompileGraph = compile_graph) -> None:
        super().__init__(compile_graph, "Compiling steps")

    def __reduce__(self) -> tuple:
        """Leave compiled steps out of copies and pickles."""
        return CompiledSteps, (self._compile_graph,)

    def _free(self) -> None:
        super()._free()
        self.compiler: StepCompiler
        self._reading: StepReading | None = None  # set by the first step
        self.prompts = CompiledPrefill(self.compiler.graphs, self.warm_up)

    def refresh(self, parts: Callable[[], ModelParts]) -> None:
        """See `StepStore.refresh`; all graphs are also dropped if converted weights have changed."""
        if self._reading is not None and not self._reading.is_current():
            self._free()
        super().refresh(parts)

    def slots_for(self, like: FilledCache, rows: int, most: int, kind: BufferKind) -> int:
        """See `StepStore.slots_for`."""
        return slots_for_now(like.length, most)

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        parts = buffers.parts
        self._reading = self._reading or StepReading(parts.weights, parts.draft_unembed.head)
        with (
            gqa_attention(parts.model),
            self._reading.in_step(kind, buffers.rows, tokens // buffers.rows) as (fused, may_copy),
        ):
            return self.compiler.compile(function, buffers.state(), fused, may_copy)


class CapturedSteps(StepStore):
    """The steps of one model on a GPU, captured as CUDA graphs.

    The compiled step is captured, or the eager step if compilation fails. A step that cannot be captured runs
    without a graph.
    """

    kind = "CUDA graphs"
    reads_drafts = False  # waiting for each draft token costs more than its exit score saves
    grows = False  # unfilled slots cost next to nothing, but preparing further steps costs much
    reads_lengths = True

    def __init__(
        self, make_replay: Callable[..., Replay] = capture, compile_graph: CompileGraph | None = compile_graph
    ) -> None:
        self.make_replay = make_replay
        super().__init__(compile_graph, "Capturing steps")

    def __reduce__(self) -> tuple:
        """Leave captured steps out of copies and pickles."""
        return CapturedSteps, (self.make_replay, self._compile_graph)

    def _free(self) -> None:
        super()._free()
        self._pool: Any = None  # memory pool that the graphs share

    def _prepare(self, buffers: StepBuffers, kind: str, size: Any) -> Step:
        """See `StepStore._prepare`; weights may move to lie next to each other, after which earlier graphs are void."""
        step, parts = super()._prepare(buffers, kind, size), self._parts
        if parts is not None and (fingerprint := fingerprint_of(parts)) != self._fingerprint:
            self._steps.clear()
            self._fingerprint = fingerprint
        return step

    def slots_for(self, like: FilledCache, rows: int, most: int, kind: BufferKind) -> int:
        """See `StepStore.slots_for`: all, or as many as memory holds, of which answers seldom need more."""
        slots, least = most, like.length + FIRST_SLOTS
        while slots > least and not self.fits(like, rows, slots, kind):
            below = 1 << ((slots + WIDEST - 1).bit_length() - 1)  # the next lower power of two
            slots = max(least, below - WIDEST)
        return slots

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        compiled = None
        may_read = can_read_length(buffers.kind, buffers.cache)
        with capturable_forward(buffers.parts.model, tokens), reading_lengths(may_read):
            if self.compiler is not None:
                compiled = self.compiler.compile(function, buffers.state())
                if compiled.refused is not None:
                    logger.info("a step is captured uncompiled: %s", compiled.refused)
                function = compiled.run
            replay = self.make_replay(function, buffers.state(), buffers.device, self._pool)
        self._pool, replay.references = replay.pool, compiled
        return replay

    def advance(self, buffers: StepBuffers) -> None:
        """See `StepStore.advance`; the graph is captured uncompiled, which takes milliseconds."""
        if buffers.advancing is None:
            replay = self.make_replay(buffers.advance, buffers.state(), buffers.device, self._pool)
            self._pool, buffers.advancing = replay.pool, replay.run
        buffers.advancing()


def can_read_length(kind: BufferKind, cache: Cache) -> bool:
    """Whether attention reads the number of filled slots on the device, so that unfilled ones take no time."""
    layers: list[Any] = cache.layers  # of the model and of the draft head
    kinds = {(layer.keys.device, layer.keys.dtype, layer.keys.shape[-1]) for layer in layers}
    return kind.is_causal and all(can_flash_decode(*one) for one in kinds)


def reserved_bytes(device: torch.device) -> int:
    """Bytes that PyTorch has reserved on a GPU, to measure what preparing a step takes; 0 on other devices."""
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # captures clear these too, which must not count as a difference
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def free_memory(device: torch.device) -> int:
    """Bytes available for tensors, including PyTorch's cached memory."""
    if device.type != "cuda":
        return free_host_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + cached)


def fingerprint_of(parts: ModelParts) -> tuple:
    """What graphs depend on and may change between calls: modules, weight addresses, attention, hooks, settings.

    Every call asks for it, so it takes one walk, and looks at most attributes no closer than their type.
    """
    facts: list[Any] = [attention_of(parts.model.config.get_text_config())]
    facts += [id(hook) for hooks in (_global_forward_hooks, _global_forward_pre_hooks) for hook in hooks.values()]
    for root in (parts.model, *([parts.routers] if parts.routers is not None else [])):
        for module in root.modules():
            facts += _facts_of(module)
    return tuple(facts)


def _facts_of(module: nn.Module) -> list[Any]:
    own = module.__dict__
    # The keys of hooks are never used again.
    facts = [id(module), id(own.get("forward")), *own["_forward_hooks"], *own["_forward_pre_hooks"]]
    for name, value in own.items():
        if type(value) not in NO_SETTINGS and (setting := _setting(value)) is not None:
            facts += name, setting
    for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
        if tensor is not None:
            facts += id(tensor), *addresses_of(tensor), tensor.dtype
    return facts


def _setting(value: Any) -> Any:
    """A plain attribute of a module, such as a scale, or PEFT's list of active adapters, which may be changed."""
    if isinstance(value, list):
        return tuple(value) if all(isinstance(part, SETTING_TYPES) for part in value) else None
    return value if isinstance(value, SETTING_TYPES) else None
