"""The steps of one model, prepared at first use and kept between calls."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .module_guards import hooks_of, settings_of
from .progress import WarmUp
from .replay import Replay
from .step_buffers import WIDTHS, Parts, StepBuffers, capacity_for

MAX_GRAPHS = 64
MAX_BUFFERS = 8  # by number of rows and slots

logger = logging.getLogger(__name__)


class Step:
    """A prepared step.

    Attributes:
        replay: Runs it.
        num_layers: Decoder layers that it executes, counted once per row.
        logits: (rows, width, vocabulary) of a verify pass; overwritten by the next step.
    """

    replay: Replay
    num_layers: int = 0
    logits: Any = None


class StepStore:
    """The steps of one model. One call at a time can use them; subclasses decide how steps are prepared.

    Args:
        layers: Makes the compiler of layers inside steps; `None` runs layers natively.
        warm_up: Counts prepared steps and what they took.

    Attributes:
        kind: Name of the prepared form, for log messages.
        widths: Widths of verify passes.
        reads_drafts: Whether the host reads each draft token and its score before the next draft step.
        grows: Whether buffers start with few slots and grow with the answer.
        prompts: Runs the layers of prefill, where that is faster than natively.
        warm_up: Steps prepared so far and what they took, including the memory of buffers.
        refused: Why the model's steps cannot be prepared, if so; reset by `release`.
        reads: Number of host synchronisations.
        replays: Number of steps run.
    """

    kind: str
    prompts: Any = None
    widths: tuple[int, ...] = WIDTHS
    reads_drafts: bool
    grows: bool

    def __init__(self, layers: Callable[[], Any] | None, warm_up: WarmUp) -> None:
        self._make_layers, self.warm_up = layers, warm_up
        self.reads, self.replays = 0, 0
        self.lock = Lock()
        self.release()

    def release(self) -> None:
        """Free buffers and graphs."""
        self._buffers: OrderedDict[tuple, StepBuffers] = OrderedDict()
        self._steps: OrderedDict[tuple[StepBuffers, str, int], Step] = OrderedDict()
        self._fingerprint: tuple = ()
        self._parts: Parts | None = None
        self.refused: str | None = None
        self.layers: Any = self._make_layers() if self._make_layers is not None else None

    def refresh(self, parts: Callable[[], Parts]) -> None:
        """Begin a call: drop the graphs if the model has changed since the last call.

        Steps whose capture ran out of memory are prepared again.

        Args:
            parts: Returns the parts of the model that steps run.
        """
        for key in [key for key, step in self._steps.items() if step.replay.may_do_later]:
            del self._steps[key]
        found = self._parts or parts()
        if (fingerprint := fingerprint_of(found)) != self._fingerprint:
            found = found if self._parts is None else parts()
            self.release()
            if self.layers is not None:
                found = replace(found, execute_layer=self.layers.run)
            self._parts, self._fingerprint = found, fingerprint

    def buffers(self, like: Cache, rows: int, slots: int, **kinds: Any) -> StepBuffers:
        """Buffers of at least `slots` slots and `rows` rows, in a call that has begun.

        Existing buffers of up to twice as many slots and less than twice as many rows are reused, since unused slots
        cost less than preparing further steps.

        Args:
            like: The filled cache of the call.
            rows: Number of sequences.
            slots: Number of slots that the call may need.
            **kinds: As for `StepBuffers`.
        """
        first: Any = like.layers[0]
        key, alike = self._key_of(like, rows, slots, kinds)
        if key not in self._buffers:
            before = reserved_bytes(first.keys.device)
            shared = next((self._buffers[other].cache for other in alike if other[1] == key[1]), None)
            parts: Any = self._parts
            self._buffers[key] = StepBuffers(parts, like, rows, key[1], **kinds, shared=shared)
            self.warm_up.add(0, 0.0, reserved_bytes(first.keys.device) - before)
            while len(self._buffers) > MAX_BUFFERS:
                _, oldest = self._buffers.popitem(last=False)
                for step in [step for step in self._steps if step[0] is oldest]:
                    del self._steps[step]
        self._buffers.move_to_end(key)
        return self._buffers[key]

    def has_memory(self, like: Cache, rows: int, slots: int, **kinds: Any) -> bool:
        """Whether the K/V of what [`buffers`] would return are allocated already."""
        key, alike = self._key_of(like, rows, slots, kinds)
        return any(other[1] == key[1] for other in alike)

    def _key_of(self, like: Cache, rows: int, slots: int, kinds: dict[str, Any]) -> tuple[tuple, list[tuple]]:
        """The key of the buffers to reuse or to allocate, and the keys of all that are large enough."""
        first: Any = like.layers[0]
        capacity = capacity_for(rows, slots)
        others = (first.keys.dtype, len(like.layers), *sorted(kinds.items()))
        alike = [key for key in self._buffers if key[2:] == others and key[0] >= rows and key[1] >= capacity]
        near = [key for key in alike if key[0] < 2 * rows and key[1] <= 2 * capacity]
        return min(near, default=(rows, capacity, *others)), alike

    def smaller(self, buffers: StepBuffers, rows: int) -> StepBuffers | None:
        """Existing buffers with fewer rows and the same steps, for the `rows` sequences that are left."""
        kind = next((key[1:] for key, found in self._buffers.items() if found is buffers), None)
        steps = self._steps_of(buffers)
        for key in sorted(key for key in self._buffers if key[1:] == kind and rows <= key[0] < buffers.rows):
            if steps <= self._steps_of(self._buffers[key]):
                self._buffers.move_to_end(key)
                return self._buffers[key]
        return None

    def _steps_of(self, buffers: StepBuffers) -> set[tuple[str, int]]:
        return {(kind, size) for found, kind, size in self._steps if found is buffers}

    def run(self, buffers: StepBuffers, kind: str, size: int) -> Step:
        """Run a step: `("verify", width)` or `("draft", exit_layer)`. It is prepared at first use."""
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

    def read(self, buffers: StepBuffers) -> list[list[int]]:
        """Wait for the steps' results and return them."""
        self.reads += 1
        return buffers.read()

    def _prepare(self, buffers: StepBuffers, kind: str, size: int) -> Step:
        step = Step()
        method: Any = {"verify": buffers.verify, "draft": buffers.draft}[kind]

        def function() -> Any:
            step.num_layers, logits = method(size)
            return logits

        start, before = perf_counter(), reserved_bytes(buffers.device)
        tokens = buffers.rows * (size if kind == "verify" else 1)
        step.replay = replay = self._replay_of(function, buffers, kind, tokens)
        name = type(buffers.parts.model).__name__
        if replay.may_do_later:
            logger.warning("%s runs some steps without %s: %s", name, self.kind, replay.refused)
        elif replay.refused is not None and self.refused is None:
            self.refused = replay.refused
            logger.warning("%s runs without %s: %s", name, self.kind, self.refused)
        seconds, used = perf_counter() - start, reserved_bytes(buffers.device) - before
        self.warm_up.add(1, seconds, used)
        where = f"{kind} step, {'width' if kind == 'verify' else 'depth'} {size}, {buffers.rows} x {buffers.capacity}"
        logger.info("step %d (%s slots): %.2f s, %.0f MB", self.warm_up.num_made, where, seconds, used / 1e6)
        return step

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        """Prepare a step; `tokens` counts all rows."""
        raise NotImplementedError


def reserved_bytes(device: torch.device) -> int:
    """Bytes that PyTorch has reserved on a GPU, to compare before and after; 0 on other devices."""
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # captures free these, and empty the cache, too
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def fingerprint_of(parts: Parts) -> tuple:
    """What graphs depend on that may change between calls: modules, weight addresses, attention, hooks, settings."""
    facts: list[Any] = [parts.model.config.get_text_config()._attn_implementation]
    for root in (parts.model, *([parts.routers] if parts.routers is not None else [])):
        for module in root.modules():  # one walk for modules and tensors, since it takes time in every call
            facts.append((id(module), id(module.__dict__.get("forward")), hooks_of(module), settings_of(module)))
            tensors = (*module._parameters.values(), *module._buffers.values())
            facts += [(id(tensor), _address(tensor), tensor.dtype) for tensor in tensors if tensor is not None]
    return tuple(facts)


def _address(tensor: Tensor) -> int:
    """A tensor's address; 0 for subclasses such as quantised weights, which are identified by the object."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
