"""Steps of fixed shape: a draft token at some depth, a verify pass of some width. On a GPU each is one CUDA graph.

A step runs the model's own forward on buffers that stay where they are (`fixed_cache`); what changes from round to
round (tokens, slots, positions) is in tensors on the device, written by one copy. A draft step puts its token where the
next step looks for it, so a chain of drafts and the pass that verifies them need the host only to start them. Without a
graph the same function runs as it is, which is how tests on a CPU see it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .block_drafting import BlockRun
from .compiled_layers import CompiledLayers
from .errors import UnsupportedOptionError, describe
from .fixed_cache import fill, fixed_cache
from .modeling_tide import TIDERouters
from .replay import Replay, replay_of
from .skipping import FixedDepthRun, LayerRun, active
from .structure import DecoderStructure
from .unembed import DraftUnembed, Unembed

WIDTHS = (1, 2, 4, 8, 16)  # of verify passes; others are filled up
WIDEST = WIDTHS[-1]
BUCKET = 256  # slots; buffers, and so graphs, serve all calls up to the next multiple
SPARE_SLOTS = 256  # for holes, with several rows
MOST_GRAPHS = 64
MOST_BUFFERS = 4  # by numbers of rows and slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What of an attached model the steps run."""

    model: Any
    structure: DecoderStructure
    unembed: Unembed
    draft_unembed: DraftUnembed
    routers: TIDERouters | None
    execute_layer: Any = None


class Step:
    """What a step leaves behind.

    Attributes:
        replay: Runs it.
        num_layers: Decoder layers that it runs, once per row.
        logits: (rows, width, vocabulary) of a verify pass; the next step may write over them.
    """

    replay: Replay
    num_layers: int = 0
    logits: Any = None


class StepBuffers:
    """The tensors of all steps of one number of rows and slots, and the steps.

    Args:
        parts: What the steps run.
        like: A filled cache of the model's, for shapes and dtypes.
        rows: Sequences.
        capacity: Slots of each.
        has_positions: Whether the model is told the positions.
        has_block: Whether the block drafts, whose K/V are in the last layer of the cache.
    """

    def __init__(
        self, parts: Parts, like: Cache, rows: int, capacity: int, has_positions: bool, has_block: bool
    ) -> None:
        self.parts, self.rows, self.capacity, self.has_positions = parts, rows, capacity, has_positions
        first: Any = like.layers[0]
        self.device = device = first.keys.device
        self.cache = fixed_cache(like, rows, capacity)
        self.steps: OrderedDict[tuple[str, int], Step] = OrderedDict()
        hidden, dtype = parts.structure.hidden_size, first.keys.dtype
        sizes = (1, 1, rows, rows, rows * WIDEST)  # of what the host says in each round
        with torch.inference_mode(False):
            self._said = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
            self._heard = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
            self.mask = torch.ones((rows, capacity), dtype=torch.int64, device=device)
            self._mask_said = torch.ones((rows, capacity), dtype=torch.int64, pin_memory=device.type == "cuda")
            self._results = torch.zeros((rows, 2 * WIDEST), dtype=torch.int64, device=device)
            if has_block:
                self.finals = torch.zeros((rows, WIDEST, hidden), dtype=dtype, device=device)
                self.deep = torch.zeros((rows, 1, hidden), dtype=dtype, device=device)
                self.deep_drafted = torch.zeros_like(self.deep)
        self.start, self.fed, self.positions, self.kept, ids = self._heard.split(sizes)
        self.ids = ids.view(rows, WIDEST)
        self.block: BlockRun | None = None
        if has_block and parts.routers is not None and parts.routers.block is not None:
            block_layer = parts.routers.config.block_layer
            self.block = BlockRun(parts.structure, self.cache, parts.unembed, parts.routers.block, block_layer)

    def load(self, source: Cache, length: int, mask: Tensor | None, deep: Tensor | None) -> None:
        """Take over a cache of `length` tokens, its (rows, length) mask, and the block's last deep state."""
        fill(self.cache, source, length)
        self.write_mask(mask)
        if deep is not None and self.block is not None:
            self.deep.copy_(deep)

    def write_mask(self, mask: Tensor | None) -> None:
        """Hide what a (rows, length) mask on the CPU hides; `None` hides nothing."""
        self._mask_said.fill_(1)
        if mask is not None:
            self._mask_said[:, : mask.shape[1]] = mask
        self.mask.copy_(self._mask_said, non_blocking=True)

    def write(self, start: int, positions: list[int], ids: list[list[int]], kept: list[int] | None) -> None:
        """Say what a round starts from, by one copy that nobody waits for.

        Args:
            start: The first slot to write to.
            positions: Of each row's first token.
            ids: Each row's last token, and draft tokens behind it.
            kept: How many tokens of the pass before each row kept; `None` before the first.
        """
        padded = [token for row in ids for token in row + row[-1:] * (WIDEST - len(row))]
        behind = [max(0, count - 1) for count in kept] if kept is not None else [0] * self.rows
        self._said.copy_(torch.tensor([start, 0, *positions, *behind, *padded]))
        self._heard.copy_(self._said, non_blocking=True)
        if self.block is not None:
            if kept is not None:
                index = self.kept[:, None, None].expand(-1, 1, self.finals.shape[-1])
                self.deep.copy_(self.finals.gather(1, index))
            self.deep_drafted.copy_(self.deep)

    def read(self) -> list[list[int]]:
        """Wait for the round; return for each row the full model's tokens, and behind `WIDEST` what it was fed."""
        return self._results.tolist()

    def state(self) -> list[Tensor]:
        """What a step changes that another run of it would not change back."""
        return [self._heard, *([self.deep_drafted] if self.block is not None else [])]

    def verify(self, width: int) -> tuple[int, Tensor]:
        """A pass at full depth over the first `width` tokens of each row; return layers run and logits."""
        run = self.block or LayerRun(self.parts.structure, self.cache)
        run.execute_layer = self.parts.execute_layer
        before = run.layers_executed
        if self.block is not None:
            self.block.deep_before = self.deep
        with active(run):
            logits = self._forward(self.ids[:, :width], self.start[0]).logits
        self._results[:, :width] = logits.argmax(dim=-1)
        self._results[:, WIDEST:] = self.ids
        if self.block is not None:
            self.finals[:, :width] = self.block.final
        return run.layers_executed - before, logits

    def draft(self, exit_layer: int) -> tuple[int, None]:
        """One draft token for each row, put behind the one it was drafted from; return layers run."""
        run = FixedDepthRun(self.parts.structure, self.cache, exit_layer)
        run.execute_layer = self.parts.execute_layer
        if self.block is not None:
            self.block.execute_layer = self.parts.execute_layer
        ids = self.ids.index_select(1, self.fed)
        with active(run):
            call = run.call_after(self._forward, ids, self.start[0] + self.fed[0], self.fed)
        if self.block is not None and exit_layer == self.block.block_layer:
            self.block.drafted = self.deep_drafted
            state = self.block.draft(call)
            self.deep_drafted.copy_(self.block.drafted)
        else:
            routers: Any = self.parts.routers
            state = routers[exit_layer].head(call.state[:, -1])
        self.fed.add_(1)
        self.ids.index_copy_(1, self.fed, self.parts.draft_unembed(state)[:, None])
        return run.layers_executed, None

    def _forward(self, ids: Tensor, start: Tensor, fed: Tensor | int = 0) -> Any:
        width = ids.shape[1]
        self.cache.layers[0].place.move_to(start, width)  # type: ignore[attr-defined]
        inputs = {"input_ids": ids, "attention_mask": self.mask, "past_key_values": self.cache, "use_cache": True}
        if self.has_positions:
            steps = torch.arange(width, device=self.device) + fed
            inputs["position_ids"] = self.positions[:, None] + steps
        return self.parts.model(**inputs, return_dict=True)


class CapturedSteps:
    """The steps of one model, kept from call to call. One call at a time can use them.

    Args:
        make_replay: What makes a step ready to run again.
        layers: Compiles the layers, so that a graph has few and large kernels; `None` leaves them as they are.

    Attributes:
        num_captured: Steps made ready so far.
        seconds: What that took.
        bytes: Device memory that it took, buffers included.
        refused: Why the model cannot be captured, once that is known.
        reads: Times that the host waited for the device.
        replays: Steps run.
    """

    def __init__(
        self,
        make_replay: Callable[..., Replay] = replay_of,
        layers: Callable[[], CompiledLayers] | None = CompiledLayers,
    ) -> None:
        self.make_replay, self._make_layers = make_replay, layers
        self.num_captured, self.reads, self.replays = 0, 0, 0
        self.seconds, self.bytes = 0.0, 0
        self.refused: str | None = None
        self.lock = Lock()
        self._said: set[str] = set()
        self.release()

    def __reduce__(self) -> tuple:
        """Copies and pickles of a model capture for themselves."""
        return CapturedSteps, (self.make_replay, self._make_layers)

    def release(self) -> None:
        """Give buffers and graphs back."""
        self._buffers: OrderedDict[tuple, StepBuffers] = OrderedDict()
        self._fingerprint: tuple = ()
        self._parts: Parts | None = None
        self._pool: Any = None
        self.layers = self._make_layers() if self._make_layers is not None else None

    def say_once(self, reason: str) -> bool:
        """Whether this is the first call that does without for this reason."""
        is_new = reason not in self._said
        self._said.add(reason)
        return is_new

    def check_device(self, device: torch.device) -> None:
        """Refuse a model on a device that has no graphs.

        Raises:
            UnsupportedOptionError: It is not on a CUDA GPU.
        """
        if self.make_replay is replay_of and device.type != "cuda":
            raise UnsupportedOptionError(
                describe(
                    "engine='cuda_graph' needs a GPU",
                    got=f"a model on {device.type!r}",
                    expected="a model on one CUDA GPU",
                    do="Move the model there, or pass engine='compiled', which runs on CPUs, or engine='auto'.",
                )
            )

    def buffers(self, parts: Callable[[], Parts], like: Cache, rows: int, slots: int, **kinds: bool) -> StepBuffers:
        """Buffers of at least `slots` slots; graphs of a model that has changed since are forgotten.

        Args:
            parts: Makes what the steps run, where it is not known yet.
            like: The filled cache of the call.
            rows: Sequences.
            slots: Slots that the call may need.
            **kinds: As `StepBuffers` takes them.
        """
        found = self._parts or parts()
        if (fingerprint := fingerprint_of(found)) != self._fingerprint:
            self.release()
            found = parts()
            if self.layers is not None:
                found = replace(found, execute_layer=self.layers.run)
            self._parts, self._fingerprint = found, fingerprint
        first: Any = like.layers[0]
        capacity = capacity_for(rows, slots)
        key = (rows, capacity, first.keys.dtype, len(like.layers), *sorted(kinds.items()))
        if key not in self._buffers:
            while len(self._buffers) >= MOST_BUFFERS:
                self._buffers.popitem(last=False)
            before = memory_of(first.keys.device)
            self._buffers[key] = StepBuffers(found, like, rows, capacity, **kinds)
            self.bytes += memory_of(first.keys.device) - before
        self._buffers.move_to_end(key)
        return self._buffers[key]

    def run(self, buffers: StepBuffers, kind: str, size: int) -> Step:
        """Run a step: `("verify", width)` or `("draft", exit_layer)`. The first time it is made ready."""
        key = (kind, size)
        if key not in buffers.steps:
            self._make(buffers, key)
        buffers.steps.move_to_end(key)
        step = buffers.steps[key]
        step.replay.run()
        self.replays += 1
        return step

    def read(self, buffers: StepBuffers) -> list[list[int]]:
        """Wait for what the steps have found."""
        self.reads += 1
        return buffers.read()

    def _make(self, buffers: StepBuffers, key: tuple[str, int]) -> None:
        while sum(len(each.steps) for each in self._buffers.values()) >= MOST_GRAPHS:
            oldest = next(each for each in self._buffers.values() if each.steps)
            oldest.steps.popitem(last=False)
        (kind, size), step = key, Step()
        method = {"verify": buffers.verify, "draft": buffers.draft}[kind]

        def function() -> None:
            step.num_layers, step.logits = method(size)

        start, before = perf_counter(), memory_of(buffers.device)
        with self.layers.ready(list(buffers.parts.structure.layers)) if self.layers is not None else nullcontext():
            step.replay = replay = self.make_replay(function, buffers.state(), buffers.device, self._pool)
        self._pool = replay.pool
        buffers.steps[key] = step
        if replay.refused is not None and self.refused is None:
            self.refused = replay.refused
            logger.warning("%s runs without CUDA graphs: %s", type(buffers.parts.model).__name__, self.refused)
        seconds, used = perf_counter() - start, memory_of(buffers.device) - before
        self.num_captured, self.seconds, self.bytes = self.num_captured + 1, self.seconds + seconds, self.bytes + used
        where = f"{kind} step, {'width' if kind == 'verify' else 'depth'} {size}, {buffers.rows} x {buffers.capacity}"
        logger.info("step %d (%s slots): %.2f s, %.0f MB", self.num_captured, where, seconds, used / 1e6)


def step_width(tokens: int) -> int:
    """The width of the verify pass that serves for so many tokens."""
    return next(width for width in WIDTHS if width >= tokens)


def capacity_for(rows: int, slots: int) -> int:
    """Slots of the buffers for a call that may need `slots`, and room for a pass."""
    needed = slots + WIDEST + (SPARE_SLOTS if rows > 1 else 0)
    return -(-needed // BUCKET) * BUCKET


def memory_of(device: torch.device) -> int:
    """Bytes that PyTorch holds on a GPU; 0 elsewhere."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def fingerprint_of(parts: Parts) -> tuple:
    """What graphs depend on that can change between calls: modules, where their weights are, how they attend."""
    roots = [parts.model, *([parts.routers] if parts.routers is not None else [])]
    modules = [(id(module), id(module.__dict__.get("forward"))) for root in roots for module in root.modules()]
    tensors = [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
    return (
        tuple(modules),
        tuple((id(tensor), _address(tensor), tensor.dtype) for tensor in tensors),
        parts.model.config.get_text_config()._attn_implementation,
    )


def _address(tensor: Tensor) -> int:
    """Where a tensor's values are; packed ones do not say, and are known by the object alone."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
