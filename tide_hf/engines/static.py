"""The static engine: steps of fixed shape on a static cache, with one upload and one read a round.

Prefill runs on the eager engine into the call's own cache, which is then copied into the static cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..depth.linear_gate import KERNEL_LAYOUTS, allowed_layouts
from ..kernels.cpu.attention import MIN_QUERIES, is_faster
from ..kernels.cpu.cpp_kernels import load_op
from ..speculation.engine import Engine
from ..speculation.policy import CostTable, step_width
from .capturable import why_not_after_prefill
from .eager import EagerEngine
from .gqa_attention import gqa_attention
from .steps.row_map import RowMap
from .steps.static_cache import StaticCacheSlots, give_back, static_cache_bytes
from .steps.step_buffers import WIDEST, Parts, StepBuffers, capacity_for, slots_for_now
from .steps.step_store import StepStore

MEMORY_SHARE = 0.5  # of the free memory, which a call's buffers may take

logger = logging.getLogger(__name__)


class StaticEngine:
    """Runs one call on steps of fixed shape, after an eager prefill.

    Rows that have stopped keep their places and cost, unless steps for fewer rows exist already.

    Args:
        prompt: Runs prefill, or the whole call while another call holds the steps.
        steps: The model's steps.
    """

    def __init__(self, prompt: EagerEngine, steps: StepStore) -> None:
        self.prompt, self.steps = prompt, steps
        self.name, self.temperature = prompt.name, prompt.temperature
        self.widths, self.reads_drafts = steps.widths, steps.reads_drafts
        self.newest: list[int] = []  # each row's last token, the next pass's input
        self._has_steps = False
        self._buffers: StepBuffers | None = None
        self._slots: Any = None  # StaticCacheSlots, after prefill
        self._rows: Any = None  # RowMap, likewise
        self._position_shape: tuple[int, ...] | None = None
        self._positions: list[list[int]] = []  # each row's next position, one per kind (mRoPE)
        self._added: list[int] = []  # generated tokens of each row
        self._room = 0  # most tokens that a row may generate
        self._kept: list[int] | None = None  # accepted tokens of each row in the last pass
        self._layers = 0
        self._num_fed = 0  # draft steps since the last rollback
        self._unread: tuple[int, int] | None = None  # exit layer and number of draft steps not read yet
        self._marks: list[Any] = []
        self._compactions = 0
        self._width, self._started = 0, 0.0
        self._drafted: list[list[int]] = []
        self._logits: Any = None
        self._results: list[list[int]] | None = None
        self._made_before = 0  # number of steps prepared before this round

    @property
    def layers_executed(self) -> int:
        """Decoder layers executed, counted once per row and pass."""
        return self.prompt.layers_executed + self._layers

    @property
    def block_layer(self) -> int | None:
        """The exit layer at which the block head drafts in this call, if it does."""
        return self.prompt.block_layer

    @property
    def free_slots(self) -> int | None:
        """Learned positions that are left; `None` without such a limit."""
        last = self.prompt.last_slot
        return None if last is None else max(0, last - self._slots.length - 1)

    @property
    def buffers(self) -> StepBuffers:
        """The buffers, which exist after prefill."""
        assert self._buffers is not None
        return self._buffers

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of steps over the buffers' rows, whether or not they belong to a sequence."""
        return self.prompt.attachment.costs_of(self.buffers.rows, self.name, self.widths)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the steps, unless another call does; see `Engine.running`."""
        self._has_steps = self.steps.lock.acquire(blocking=False)
        try:
            with self.prompt.running():
                yield
        finally:
            if self._has_steps:
                self.steps.lock.release()

    def decoding(self) -> AbstractContextManager[None]:
        """As the eager engine's."""
        return self.prompt.decoding()

    def prefill(self) -> Tensor:
        """Run prefill, with compiled layers and kernels where there are some."""
        if self._has_steps:
            self.steps.refresh(self._parts)
        with ExitStack() as kernels:
            if self._has_steps and self.steps.prompts is not None:
                self._use_kernels(kernels)
            return self.prompt.prefill()

    def begin(self, tokens: list[int]) -> None:
        """Set each row's first generated token."""
        self.prompt.begin(tokens)

    def decoder(self, room: int) -> Engine:
        """This engine; the eager one if the call cannot run on steps, or another call holds them."""
        prompt = self.prompt
        if not self._has_steps:
            return prompt
        cache, mask, positions = prompt._slots.cache, prompt._slots.mask, prompt.positions
        if positions is not None:  # as the model prepares them: PaliGemma counts from 1
            positions = prompt.inputs_of([[token] for token in prompt.newest]).get("position_ids")
        if (reason := why_not_after_prefill(cache, prompt.positions, positions)) is not None:
            logger.info("the call runs eagerly after prefill: %s", reason)
            return prompt
        positions = None if positions is None else positions[..., 0]
        self._position_shape = None if positions is None else tuple(positions.shape[:-1])
        rows, length = len(prompt.newest), int(cache.get_seq_length())
        self.newest, self._added, self._room = list(prompt.newest), [0] * rows, room
        if not self._fits(cache, length):
            return prompt
        self._buffers = buffers = self._buffers_for(cache, length)
        self._rows = RowMap(rows, buffers.rows)
        mask = mask.cpu()[self._rows.shown] if mask is not None else None
        buffers.load(cache, length, mask, prompt.block.prev_hidden_state if prompt.block is not None else None)
        self._slots = StaticCacheSlots(buffers.cache, length, mask, prompt._slots.compaction_threshold)
        self._positions = [[0]] * rows if positions is None else positions.reshape(-1, rows).T.tolist()
        self._made_before = self.steps.warm_up.num_made
        return self

    def draft(self, exit_layer: int, drafted: list[list[int]]) -> tuple[list[int], list[float]]:
        """Decode one token for each row, with one step for each token that the exit layer has not processed."""
        buffers, start, fed = self.buffers, perf_counter(), self._num_fed
        if fed == 0:
            self._upload([[token] for token in self.newest])
            buffers = self.buffers
        num_steps = len(drafted[0]) + 1 - fed
        for position in range(fed, fed + num_steps):
            if position:
                buffers.feed(self._rows.spread([tokens[position - 1] for tokens in drafted]))
            self._layers += self.steps.run(buffers, "draft", exit_layer).num_layers
        self._num_fed += num_steps
        tokens, scores = buffers.read_draft()
        if self._is_warm:
            self.costs_of(len(drafted)).record(("draft", exit_layer), (perf_counter() - start) * 1000 / num_steps)
        return self._rows.gather(tokens), self._rows.gather(scores)

    def draft_unread(self, exit_layer: int, num_tokens: int) -> None:
        """Start a chain of draft steps whose tokens are read only when they are verified."""
        self._started = perf_counter()
        self._upload([[token] for token in self.newest])
        buffers = self.buffers
        self._marks = [_mark(buffers.device)]
        for _ in range(num_tokens):
            self._layers += self.steps.run(buffers, "draft", exit_layer).num_layers
        self._marks.append(_mark(buffers.device))
        self._unread = (exit_layer, num_tokens)

    def rollback(self) -> None:
        """Drop the drafts; the verify pass overwrites their K/V."""
        self._num_fed = 0

    def verify(self, drafted: list[list[int]]) -> None:
        """Run one full-depth pass, padded to the next width that has a step."""
        self._drafted, self._results = drafted, None
        self._width = step_width(1 + max(map(len, drafted)), self.widths)
        if self._unread is None:
            self._started = perf_counter()
            self._upload([[newest, *tokens] for newest, tokens in zip(self.newest, drafted, strict=True)])
        step = self.steps.run(self.buffers, "verify", self._width)
        self._layers += step.num_layers
        self._logits = step.logits

    def drafted(self) -> list[list[int]] | None:
        """The draft tokens of the last pass, if they were not read before."""
        if self._unread is None:
            return None
        lengths = map(len, self._drafted)
        return [found[WIDEST + 1 :][:length] for found, length in zip(self._read(), lengths, strict=True)]

    def logits(self) -> Tensor:
        """(rows, width, vocabulary) of the last pass."""
        own = self._rows.own
        return self._logits[: len(own)] if own[-1] == len(own) - 1 else self._logits[own]

    def top_tokens(self) -> list[list[int]]:
        """The top-1 token at each position."""
        return self._read()

    def commit(self, new_tokens: list[list[int]]) -> None:
        """Keep the K/V of the accepted tokens of the last pass; see `Engine.commit`."""
        self._kept = accepted = [len(tokens) for tokens in new_tokens]
        self._slots.commit(self._width, self._rows.spread(accepted))
        moved = zip(self._positions, accepted, strict=True)
        self._positions = [[position + count for position in kinds] for kinds, count in moved]
        self._added = [before + count for before, count in zip(self._added, accepted, strict=True)]
        self.newest = [tokens[-1] if tokens else newest for newest, tokens in zip(self.newest, new_tokens, strict=True)]
        milliseconds = self._without_drafts((perf_counter() - self._started) * 1000)
        if self._is_warm:
            self.costs_of(len(accepted)).record(("verify", self._width), milliseconds)
        self._made_before = self.steps.warm_up.num_made

    def select(self, rows: list[int]) -> None:
        """Drop finished sequences: move to smaller buffers if there are some, else ignore their rows."""
        if self._buffers is None:
            self.prompt.select(rows)
            return
        self._rows.keep(rows)
        self.newest = [self.newest[row] for row in rows]
        self._positions = [self._positions[row] for row in rows]
        self._added = [self._added[row] for row in rows]
        self._kept = None if self._kept is None else [self._kept[row] for row in rows]
        smaller = self.steps.smaller(self.buffers, len(rows))
        if smaller is not None:
            self._move_to(smaller)
        else:
            self._slots.show(self._rows.spread(self._rows.own))

    def finish(self, settle: bool) -> Any:
        """Copy the K/V back to the call's own cache, if it is returned; see `Engine.finish`."""
        prompt = self.prompt
        if self._buffers is not None and prompt.is_returned:
            self._slots.settle()
            give_back(self.buffers.cache, prompt._slots.cache, self._slots.length)
            if prompt.block is not None and self._kept is not None:
                prompt.block.continue_from(self.buffers.last_hidden_states, self._kept)
        return prompt.finish(settle)

    @property
    def _is_warm(self) -> bool:
        """Whether no step was prepared in this round, so that its time is that of its passes."""
        return self.steps.warm_up.num_made == self._made_before

    def _read(self) -> list[list[int]]:
        """The results of this round for each sequence; reading them is its one host synchronisation."""
        if self._results is None:
            self._results = self._rows.gather(self.steps.read(self.buffers))
        return self._results

    def _upload(self, ids: list[list[int]]) -> None:
        """Upload the inputs of the round."""
        if not self._slots.make_room(WIDEST):  # continue in buffers with more slots
            self._move_to(self._buffers_for(self.buffers.cache, self._slots.length))
        if self._slots.holes is not None or self._slots.num_compactions > self._compactions:
            self.buffers.write_mask(self._slots.mask)
            self._compactions = self._slots.num_compactions
        spread = self._rows.spread
        kept = None if self._kept is None else spread(self._kept)
        self.buffers.write(self._slots.length, spread(self._positions), spread(ids), kept)

    def _without_drafts(self, milliseconds: float) -> float:
        """Record the cost of a finished round's unread draft steps; return the rest of its time."""
        if self._unread is None:
            return milliseconds
        (exit_layer, num_tokens), (before, after) = self._unread, self._marks
        drafts = before.elapsed_time(after) if isinstance(before, torch.cuda.Event) else (after - before) * 1000
        if self._is_warm:
            self.costs_of(len(self.newest)).record(("draft", exit_layer), drafts / num_tokens)
        self._unread = None
        return max(0.0, milliseconds - drafts)

    def _parts(self) -> Parts:
        attachment = self.prompt.attachment
        return Parts(
            self.prompt.model, attachment.structure, attachment.unembed, attachment.draft_unembed(), attachment.routers
        )

    def _use_kernels(self, prompt: ExitStack) -> None:
        """Run prefill with compiled layers and kernels, whose compilation counts as warm-up."""
        dtype, start, compiled_before = self.prompt.model.dtype, perf_counter(), load_op.cache_info().misses
        load_op("skinny_gemm", dtype)
        if self.prompt.input_ids.shape[1] >= MIN_QUERIES:
            is_faster(dtype)  # measured here, outside of any trace
        if load_op.cache_info().misses > compiled_before:
            self.steps.warm_up.add(0, perf_counter() - start)
        prompt.enter_context(gqa_attention(self.prompt.model))
        prompt.enter_context(allowed_layouts(KERNEL_LAYOUTS))
        self.prompt.run.execute_layer = self.steps.prompts.run
        prompt.callback(setattr, self.prompt.run, "execute_layer", None)

    @property
    def _kinds(self) -> dict[str, Any]:
        """The properties that buffers are keyed by."""
        has = {"has_block": self.prompt.block is not None, "has_scores": self.reads_drafts}
        return {"position_shape": self._position_shape, **has}

    def _buffers_for(self, like: Cache, filled: int) -> StepBuffers:
        return self.steps.buffers(like, len(self.newest), self._num_slots(filled), **self._kinds)

    def _num_slots(self, filled: int) -> int:
        most = filled + self._room - min(self._added)  # `filled` includes a cache passed by the caller
        return slots_for_now(filled, most) if self.steps.grows else most

    def _move_to(self, buffers: StepBuffers) -> None:
        """Continue the unfinished sequences in other buffers."""
        slots, own, other = self._slots, self._rows.own, self.buffers
        self._rows = RowMap(len(own), buffers.rows)
        slots.show(self._rows.spread(own))
        buffers.take_over(other, slots.length, slots.mask, own)
        slots.cache, self._buffers = buffers.cache, buffers

    def _fits(self, cache: Cache, filled: int) -> bool:
        """Whether the buffers exist, or fit into memory."""
        rows, slots = len(self.newest), self._num_slots(filled)
        if self.steps.has_memory(cache, rows, slots, **self._kinds):
            return True
        needed = static_cache_bytes(cache, rows, capacity_for(rows, slots))
        first: Any = cache.layers[0]
        free = free_memory(first.keys.device)
        if needed > MEMORY_SHARE * free:
            logger.warning(
                "the call runs eagerly: K/V buffers of %d slots would take %.1f GB of %.1f GB that are free",
                slots,
                needed / 1e9,
                free / 1e9,
            )
        return needed <= MEMORY_SHARE * free


def free_memory(device: torch.device) -> int:
    """Bytes available for tensors, including PyTorch's cached memory."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + kept)


def _mark(device: torch.device) -> Any:
    """Record a timestamp on the device, without waiting for it."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
