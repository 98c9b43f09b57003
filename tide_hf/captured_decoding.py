"""The self-speculative loop on captured steps: one upload and one read per round, however many tokens it drafts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .attachment import Attachment
from .captured_steps import CapturedSteps
from .drafting import UNREAD, Drafter
from .fixed_cache import FixedSlots, fixed_bytes, give_back
from .kv_cache import CacheSlots, cache_is_returned
from .ranks import ranks_of
from .speculation import SelfSpeculativeDecoder, ShallowLayers
from .step_buffers import WIDEST, Parts, StepBuffers, capacity_for, step_width

KNOWN_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
ATTENTION = ("eager", "sdpa")
MEMORY_SHARE = 0.5  # of the free memory that a call's buffers may take

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallFacts:
    """What decides whether a call can run on captured steps.

    Attributes:
        rows: Sequences.
        devices: Of the model's weights.
        attention: The implementation.
        cache: Name of the cache's class.
        layer_kinds: Names of its layers' classes.
        arguments: What `generate` hands to the model.
        has_windows: Whether some layers attend to a part of the context.
        is_sharded: Whether processes share the model.
        has_adapters: Whether there are adapters in the layers.
        training: Whether the model is in training mode.
        refused: What an earlier call found.
    """

    rows: int
    devices: frozenset[str]
    attention: str
    cache: str
    layer_kinds: frozenset[str]
    arguments: frozenset[str]
    has_windows: bool
    is_sharded: bool
    has_adapters: bool
    training: bool
    refused: str | None = None


def why_not_captured(facts: CallFacts) -> str | None:
    """Why a call runs eagerly instead, or `None`."""
    kinds = facts.layer_kinds - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    reasons = {
        f"the model is spread over {', '.join(sorted(facts.devices))}": len(facts.devices) != 1,
        "processes share the model, and measure costs together": facts.is_sharded,
        f"attention by {facts.attention!r} takes no fixed buffers": facts.attention not in ATTENTION,
        f"the cache is a {facts.cache}": facts.cache != DynamicCache.__name__,
        f"a cache of {', '.join(sorted(kinds))}": bool(kinds),
        f"the model is handed {', '.join(sorted(facts.arguments - KNOWN_ARGUMENTS))}": not facts.arguments
        <= KNOWN_ARGUMENTS,
        "rows with holes, and layers with a window, which would count them": facts.rows > 1 and facts.has_windows,
        "adapters may change without notice": facts.has_adapters,
        "the model is in training mode": facts.training,
        str(facts.refused): facts.refused is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def facts_of(model: Any, steps: CapturedSteps, rows: int, model_kwargs: dict[str, Any]) -> CallFacts:
    """The facts of one call of an attached model."""
    cache = model_kwargs["past_key_values"]
    config = model.config.get_text_config()
    windows = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    return CallFacts(
        rows=rows,
        devices=frozenset(str(parameter.device) for parameter in model.parameters())
        | {str(device) for device in getattr(model, "hf_device_map", {}).values() if device in ("cpu", "disk")},
        attention=config._attn_implementation,
        cache="an offloaded cache" if cache.offloading else type(cache).__name__,
        layer_kinds=frozenset(type(layer).__name__ for layer in cache.layers),
        arguments=frozenset(name for name, value in model_kwargs.items() if value is not None),
        has_windows=bool(windows) or bool(getattr(config, "sliding_window", None)),
        is_sharded=ranks_of(model).many,
        has_adapters=hasattr(model, "peft_config"),
        training=model.training,
        refused=steps.refused,
    )


class CapturedDecoder(SelfSpeculativeDecoder):
    """Decodes the sequences of one call on fixed buffers, once the prompt is read.

    Rows that are stopped keep their places: for another number of rows there would have to be other graphs.
    """

    fills_block_late = False  # a verify step does it
    shallow: CapturedShallow
    fixed_slots: FixedSlots
    native_slots: CacheSlots

    def __init__(self, model: Any, attachment: Attachment, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, attachment, *args, **kwargs)
        self.steps = attachment.captured_steps
        self.drops_stopped = False
        self.shallow = CapturedShallow(self)
        self.buffers: StepBuffers | None = None
        self.may_capture = False
        self.compactions = 0
        self.kept: list[int] | None = None
        self.read: list[list[int]] | None = None
        self.starts: list[int] = []  # each row's next position

    def decode(self, drafter: Drafter) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate until every row is stopped; eagerly while another call has the steps."""
        self.may_capture = self.steps.lock.acquire(blocking=False)
        try:
            return super().decode(drafter)
        finally:
            if self.may_capture:
                self.steps.lock.release()

    def upload(self, ids: list[list[int]]) -> None:
        """Say what the round starts from."""
        buffers, slots = self.ready, self.fixed_slots
        slots.make_room(WIDEST)
        if slots.holes is not None or slots.num_compactions > self.compactions:
            buffers.write_mask(slots.mask)
            self.compactions = slots.num_compactions
        buffers.write(slots.length, self.starts, ids, self.kept)

    @property
    def ready(self) -> StepBuffers:
        """The buffers, which there are once the prompt is read."""
        assert self.buffers is not None  # rounds come behind the prompt
        return self.buffers

    def _prefill(self, drafter: Drafter) -> None:
        super()._prefill(drafter)
        if self._is_done() or not self.may_capture or not self._fits():
            return
        self.native_slots, rows = self.slots, len(self.rows)
        cache, mask = self.slots.cache, self.slots.mask
        kinds = {"has_positions": self.positions is not None, "has_block": self.block is not None}
        self.buffers = self.steps.buffers(self._parts, cache, rows, self.config.max_length, **kinds)
        length = cache.get_seq_length()
        mask = mask.cpu() if mask is not None else None
        self.buffers.load(cache, length, mask, self.block.deep_before if self.block is not None else None)
        self.fixed_slots = FixedSlots(self.buffers.cache, length, mask, self.slots.compaction_threshold)
        self.slots = self.fixed_slots
        self.starts = self.positions.tolist() if self.positions is not None else [0] * rows
        self.positions = None

    def _fits(self) -> bool:
        """Whether there is memory for the buffers."""
        cache, rows = self.slots.cache, len(self.rows)
        needed = fixed_bytes(cache, rows, capacity_for(rows, self.config.max_length))
        device: Any = cache.layers[0].keys.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        if needed > MEMORY_SHARE * free:
            logger.warning(
                "the call runs eagerly: K/V buffers for max_length=%d would take %.1f GB of %.1f GB that are free",
                self.config.max_length,
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
        drafts = drafter.draft([row.index for row in batch], [max(0, self._room(row) - 1) for row in batch])
        width = step_width(1 + max(len(draft.tokens) for draft in drafts))
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
        new_tokens = self._accept(step.logits, drafts)
        self.kept = accepted = [len(tokens) for tokens in new_tokens]
        self.fixed_slots.commit(width, accepted)
        self.starts = [position + count for position, count in zip(self.starts, accepted, strict=True)]
        milliseconds = (perf_counter() - start) * 1000
        costs.record(("verify", width), self.shallow.take_share(milliseconds))
        self._learn(drafter, drafts, new_tokens)

    def _results(self) -> list[list[int]]:
        """What the steps of this round found; reading it is the round's one synchronisation."""
        if self.read is None:
            self.read = self.steps.read(self.ready)
        return self.read

    def _top_tokens(self, logits: Tensor) -> list[list[int]]:
        return super()._top_tokens(logits) if self.buffers is None else self._results()

    def _result(self) -> Tensor | GenerateDecoderOnlyOutput:
        if self.buffers is not None and cache_is_returned(self.config, self.native_slots.cache):
            self.fixed_slots.settle()
            give_back(self.buffers.cache, self.native_slots.cache, self.fixed_slots.length)
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
    if engine == "cuda_graph":
        steps = attachment.captured_steps
        reason = why_not_captured(facts_of(model, steps, input_ids.shape[0], model_kwargs))
        if reason is None:
            return CapturedDecoder(model, attachment, engine, input_ids, model_kwargs=model_kwargs, **common)
        if steps.say_once(reason):
            logger.warning("engine='cuda_graph' runs eagerly: %s", reason)
        engine = "eager"
    return SelfSpeculativeDecoder(model, attachment, engine, input_ids, model_kwargs=model_kwargs, **common)


class CapturedShallow(ShallowLayers):
    """The exit heads' view of a captured decoder: chains of draft steps that nobody waits for."""

    decoder: CapturedDecoder

    def __init__(self, decoder: CapturedDecoder) -> None:
        super().__init__(decoder)
        self.num_ahead = 0
        self.exit_layer = 0
        self.marks: list[Any] = []

    @property
    def runs_ahead(self) -> bool:  # type: ignore[override]
        """Whether there are steps to run; not where the call goes on eagerly."""
        return self.decoder.buffers is not None

    def run_ahead(self, exit_layer: int, num_tokens: int) -> None:
        """Draft so many tokens for each row, which nobody reads before they are verified."""
        decoder = self.decoder
        buffers = decoder.ready
        decoder.upload([[row.last] for row in decoder.batch])
        self.marks = [_mark(buffers.device)]
        for _ in range(num_tokens):
            step = decoder.steps.run(buffers, "draft", exit_layer)
            self.layers_executed += step.num_layers
        self.marks.append(_mark(buffers.device))
        self.num_ahead, self.exit_layer = num_tokens, exit_layer

    def take_share(self, milliseconds: float) -> float:
        """Record what the drafts took of a round that is over; return what is left."""
        if not self.num_ahead:
            return milliseconds
        before, after = self.marks
        drafts = before.elapsed_time(after) if isinstance(before, torch.cuda.Event) else (after - before) * 1000
        self.costs_of(len(self.decoder.batch)).record(("draft", self.exit_layer), drafts / self.num_ahead)
        self.num_ahead = 0
        return max(0.0, milliseconds - drafts)


def _mark(device: torch.device) -> Any:
    """A point in time of the device's work; no wait."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
