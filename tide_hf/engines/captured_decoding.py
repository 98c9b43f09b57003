"""The self-speculative loop on captured steps: one upload and one read per round, however many tokens it drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cpu.kernels import load_op
from ..cpu.linear_gate import COMPILED, reading
from ..cpu.many_queries import LEAST_QUERIES, is_faster
from ..cpu.products import stored_product_of
from ..cpu.shared_heads import shared_heads
from ..decoding.attachment import Attachment
from ..decoding.costs import step_width
from ..decoding.drafting import UNREAD, Drafter
from ..decoding.shallow import ShallowLayers
from ..decoding.speculation import SelfSpeculativeDecoder
from ..depth.cache_slots import CacheSlots
from ..steps.fixed_cache import FixedSlots, fixed_bytes, give_back
from ..steps.row_map import RowMap
from ..steps.step_buffers import WIDEST, Parts, StepBuffers, capacity_for, slots_for_now
from .capturable import facts_of, why_not_behind_prompt, why_not_captured
from .captured_shallow import CapturedShallow

MEMORY_SHARE = 0.5  # of the free memory that a call's buffers may take

logger = logging.getLogger(__name__)


class CapturedDecoder(SelfSpeculativeDecoder):
    """Decodes the sequences of one call on fixed buffers, once the prompt is read.

    Rows that are stopped keep their places, and cost what they did, unless there are steps for fewer rows already.

    Attributes:
        row_map: Which row of the buffers each sequence has.
    """

    on_steps = True
    fills_block_late = False  # a verify step does it
    shallow: CapturedShallow
    row_map: RowMap
    fixed_slots: FixedSlots
    native_slots: CacheSlots

    def __init__(self, model: Any, attachment: Attachment, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, attachment, *args, **kwargs)
        self.steps = attachment.steps_of(self.engine)
        self.widths = self.steps.widths
        self.shallow = CapturedShallow(self)
        self.buffers: StepBuffers | None = None
        self.may_capture = False
        self.position_shape: tuple[int, ...] | None = None
        self.compactions = 0
        self.kept: list[int] | None = None
        self.read: list[list[int]] | None = None
        self.starts: list[list[int]] = []  # each row's next position, of each kind
        self.made_before = 0  # steps, when the round began

    def decode(self, make_drafter: Callable[[ShallowLayers], Drafter]) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate until every row is stopped; eagerly while another call has the steps."""
        self.may_capture = self.steps.lock.acquire(blocking=False)
        try:
            return super().decode(make_drafter)
        finally:
            if self.may_capture:
                self.steps.lock.release()

    def upload(self, ids: list[list[int]]) -> None:
        """Say what the round starts from."""
        slots = self.fixed_slots
        if not slots.make_room(WIDEST):
            self._grow()
        buffers = self.ready
        if slots.holes is not None or slots.num_compactions > self.compactions:
            buffers.write_mask(slots.mask)
            self.compactions = slots.num_compactions
        spread = self.row_map.spread
        kept = None if self.kept is None else spread(self.kept)
        buffers.write(slots.length, spread(self.starts), spread(ids), kept)

    @property
    def ready(self) -> StepBuffers:
        """The buffers, which there are once the prompt is read."""
        assert self.buffers is not None  # rounds come behind the prompt
        return self.buffers

    def _prefill(self, drafter: Drafter) -> None:
        if self.may_capture:
            self.steps.refresh(self._parts)
        with ExitStack() as kernels:
            if self.may_capture and self.steps.prompts is not None:
                self._use_kernels(kernels)
            super()._prefill(drafter)
        if self._is_done() or not self.may_capture:
            return
        cache, mask = self.slots.cache, self.slots.mask
        length = cache.get_seq_length()
        positions = self.positions
        if positions is not None:  # as the model prepares them: paligemma counts from 1
            positions = self.inputs_of([[row.last] for row in self.batch]).get("position_ids")
        if (reason := why_not_behind_prompt(cache, self.positions, positions)) is not None:
            logger.info("the call runs eagerly behind its prompt: %s", reason)
            return
        positions = None if positions is None else positions[..., 0]
        self.position_shape = None if positions is None else tuple(positions.shape[:-1])
        if not self._fits(length):
            return
        self.buffers = self._buffers(cache, length)
        self.row_map = RowMap(len(self.batch), self.buffers.rows)
        mask = mask.cpu()[self.row_map.shown] if mask is not None else None
        self.buffers.load(cache, length, mask, self.block.deep_before if self.block is not None else None)
        self.fixed_slots = FixedSlots(self.buffers.cache, length, mask, self.slots.compaction_threshold)
        self.slots = self.fixed_slots
        rows = len(self.batch)
        self.starts = [[0]] * rows if positions is None else positions.reshape(-1, rows).T.tolist()
        self.positions = None

    def _use_kernels(self, prompt: ExitStack) -> None:
        """Have the prompt read by compiled layers and kernels; compiling these is part of the warm-up."""
        dtype, start, compiled_before = self.model.dtype, perf_counter(), load_op.cache_info().misses
        stored_product_of(dtype)
        if self.input_ids.shape[1] >= LEAST_QUERIES:
            is_faster(dtype)  # measured here, outside of any trace
        if load_op.cache_info().misses > compiled_before:
            self.steps.warm_up.add(0, perf_counter() - start)
        prompt.enter_context(shared_heads(self.model))
        prompt.enter_context(reading(COMPILED))
        self.run.execute_layer = self.steps.prompts.run
        prompt.callback(setattr, self.run, "execute_layer", None)

    def _buffers(self, like: Cache, filled: int) -> StepBuffers:
        return self.steps.buffers(like, len(self.batch), self._num_slots(filled), **self._kinds)

    @property
    def _kinds(self) -> dict[str, Any]:
        """What the buffers have."""
        has = {"has_block": self.block is not None, "has_scores": self.steps.reads_drafts}
        return {"position_shape": self.position_shape, **has}

    def _num_slots(self, filled: int) -> int:
        most = filled + max(self.chooser.room(row) for row in self.batch)  # a cache that was handed in is no prompt
        return slots_for_now(filled, most) if self.steps.grows else most

    def _grow(self) -> None:
        """Go on in buffers with more slots."""
        self._move_to(self._buffers(self.ready.cache, self.fixed_slots.length))

    def _move_to(self, buffers: StepBuffers) -> None:
        """Go on in other buffers with the sequences that go on."""
        slots, own, other = self.fixed_slots, self.row_map.own, self.ready
        self.row_map = RowMap(len(own), buffers.rows)
        slots.show(self.row_map.spread(own))
        buffers.take_over(other, slots.length, slots.mask, own)
        slots.cache, self.buffers = buffers.cache, buffers

    def _select(self, going: list[int]) -> None:
        """Let sequences that are over cost nothing more, or at least change nothing any more."""
        if self.buffers is None:
            super()._select(going)
            return
        self.row_map.keep(going)
        self.starts = [self.starts[number] for number in going]
        self.kept = None if self.kept is None else [self.kept[number] for number in going]
        smaller = self.steps.smaller(self.buffers, len(going))
        if smaller is not None:
            self._move_to(smaller)
        else:
            self.fixed_slots.show(self.row_map.spread(self.row_map.own))

    def _fits(self, filled: int) -> bool:
        """Whether there are buffers, or memory for them."""
        cache, rows, slots = self.slots.cache, len(self.batch), self._num_slots(filled)
        if self.steps.has_memory(cache, rows, slots, **self._kinds):
            return True
        needed = fixed_bytes(cache, rows, capacity_for(rows, slots))
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

    def _parts(self) -> Parts:
        attachment = self.attachment
        return Parts(
            self.model, attachment.structure, attachment.unembed, attachment.draft_unembed(), attachment.routers
        )

    def _round(self, drafter: Drafter) -> None:
        if self.buffers is None:
            super()._round(drafter)
            return
        batch, costs, start = self.batch, self.shallow.costs_of(len(self.batch)), perf_counter()
        self.made_before = self.steps.warm_up.num_made
        drafts = drafter.draft([row.index for row in batch], self._limits())
        width = step_width(1 + max(len(draft.tokens) for draft in drafts), self.widths)
        if not self.shallow.num_ahead:
            start = perf_counter()
            self.upload([[row.last, *draft.tokens] for row, draft in zip(batch, drafts, strict=True)])
        step = self.steps.run(self.buffers, "verify", width)
        self.run.layers_executed += step.num_layers
        self.read = None
        if self.shallow.num_ahead:
            for draft, found in zip(drafts, self._results(), strict=True):
                fed = found[WIDEST + 1 :]
                draft.tokens = [fed[i] if token == UNREAD else token for i, token in enumerate(draft.tokens)]
        new_tokens = self._accept(self._of_batch(step.logits), drafts)
        self.kept = accepted = [len(tokens) for tokens in new_tokens]
        self.fixed_slots.commit(width, self.row_map.spread(accepted))
        self.starts = [
            [position + count for position in kinds] for kinds, count in zip(self.starts, accepted, strict=True)
        ]
        milliseconds = self.shallow.take_share((perf_counter() - start) * 1000)
        if self.is_warm:
            costs.record(("verify", width), milliseconds)
        self._learn(drafter, drafts, new_tokens)
        self._drop_stopped()

    @property
    def is_warm(self) -> bool:
        """Whether no step had to be made ready in this round, which is no part of what a pass costs."""
        return self.steps.warm_up.num_made == self.made_before

    def _of_batch(self, logits: Tensor) -> Tensor:
        """The logits of the sequences that go on."""
        own = self.row_map.own
        if own[-1] == len(own) - 1:
            return logits[: len(own)]
        return logits[own] if self.chooser.needs_logits else logits

    def _results(self) -> list[list[int]]:
        """What the steps of this round found for each sequence; reading it is the round's one synchronisation."""
        if self.read is None:
            self.read = self.row_map.gather(self.steps.read(self.ready))
        return self.read

    def _top_tokens(self, logits: Tensor) -> list[list[int]]:
        return super()._top_tokens(logits) if self.buffers is None else self._results()

    def _result(self) -> Tensor | GenerateDecoderOnlyOutput:
        if self.buffers is not None and self.is_returned:
            self.fixed_slots.settle()
            give_back(self.buffers.cache, self.native_slots.cache, self.fixed_slots.length)
            if self.block is not None and self.kept is not None:
                self.block.keep_state(self.buffers.finals, self.kept)
            self.slots = self.native_slots
        return super()._result()


def decoder_for(
    model: Any, attachment: Attachment, engine: str, input_ids: Tensor, *, model_kwargs: dict[str, Any], **common: Any
) -> SelfSpeculativeDecoder:
    """The decoder of a call: on captured steps where `engine` says so and the call can, else as ever.

    Args:
        model: The attached model.
        attachment: What TIDE added to it.
        engine: Of the call.
        input_ids: (rows, prompt length).
        model_kwargs: What `generate` prepared.
        **common: As `SelfSpeculativeDecoder` takes them.
    """
    if engine == "cuda_graph" or (engine == "compiled" and input_ids.device.type == "cpu"):
        reason = why_not_captured(facts_of(model, attachment.steps_of(engine), input_ids.shape[0], model_kwargs))
        if reason is None:
            return CapturedDecoder(model, attachment, engine, input_ids, model_kwargs=model_kwargs, **common)
        if engine == "compiled":  # each layer by itself, whatever the cache
            logger.info("engine='compiled' runs layer by layer: %s", reason)
        else:
            attachment.captured_steps.log_eager(reason)
            engine = "eager"
    return SelfSpeculativeDecoder(model, attachment, engine, input_ids, model_kwargs=model_kwargs, **common)


def free_memory(device: torch.device) -> int:
    """Bytes that there are for tensors, those included that PyTorch keeps for later."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + kept)
