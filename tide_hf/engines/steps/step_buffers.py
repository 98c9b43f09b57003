"""The buffers of steps, and the draft and verify passes that run on them.

A step runs the model's own forward on a `static_cache`. A draft step writes its token where the next step reads it, so
a chain of draft steps and the verify pass need the host only to launch them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...base_model.unembed import greedy_tokens
from ...depth.gates import FixedDepthRun, LayerRun, active
from ...depth.head_drafting import HeadRun, HeadState
from ...depth.masks import reading_tree
from ...depth.taps import TapRun
from ...speculation.policy import TOP_DRAFTS
from ..gqa_attention import attend_static, filled_up_to
from .exit_steps import ExitSteps
from .static_cache import FilledCache, fill, first_rows, static_cache, take_rows
from .step_tensors import WIDEST, BufferKind, ModelParts, StepTensors

BUCKET = 256  # slots; capacities are multiples of this, so that calls share buffers and graphs
FIRST_SLOTS = 1024  # initial size of growing buffers, unless the call needs fewer slots
SPARE_SLOTS = 256  # extra slots for rejected slots, in buffers of several rows


class StepBuffers:
    """The tensors of all steps with the same numbers of rows and slots.

    Args:
        parts: The parts of the model that steps run.
        like: A filled cache of the model, for shapes and dtypes; taken over where its memory is spare.
        rows: Number of sequences.
        capacity: Slots per sequence.
        kind: What the buffers are for.
        shared: A static cache of as many slots and more rows, whose first rows are used instead of new memory.
    """

    def __init__(
        self,
        parts: ModelParts,
        like: FilledCache,
        rows: int,
        capacity: int,
        kind: BufferKind,
        shared: Cache | None = None,
    ) -> None:
        first: Any = like.cache.layers[0]
        self.parts, self.rows, self.capacity, self.kind, self.device = parts, rows, capacity, kind, first.keys.device
        self.cache = static_cache(like, rows, capacity) if shared is None else first_rows(shared, rows)
        self.tensors = StepTensors(parts, self.cache, rows, kind)
        with torch.inference_mode(False):
            # The likeliest tokens of the last draft step and their scores, (rows, candidates) each.
            drafts = (rows, min(TOP_DRAFTS, parts.num_drafts) if kind.has_head else 1)
            self.scores = torch.zeros(drafts, device=self.device) if kind.has_scores else None
            self.candidates = torch.zeros(drafts, dtype=torch.int64, device=self.device)
            if kind.has_head:
                shape, own = (rows, WIDEST, parts.head_size), {"dtype": first.keys.dtype, "device": self.device}
                self.last_hidden_states = torch.zeros(shape, **own)
                self.prev_hidden_state = torch.zeros((rows, 1, parts.head_size), **own)
                self.draft_hidden_state = torch.zeros_like(self.prev_hidden_state)
            # The states that a head reads which drafts apart from steps.
            taps = (rows, WIDEST, len(kind.tap_layers) * parts.structure.hidden_size)
            self.tapped = torch.zeros(taps, dtype=first.keys.dtype, device=self.device)
        self.advancing: Callable[[], Any] | None = None  # how steps that can run ahead of the host run `advance`
        self.head: HeadRun | None = self._head_run() if kind.has_head else None
        self.exits = ExitSteps(self.tensors, kind.exit_layers) if kind.exit_layers else None

    def _head_run(self) -> HeadRun | None:
        parts, routers = self.parts, self.parts.routers
        if routers is None or routers.draft_head is None:
            return None
        kv: Any = self.cache.layers[parts.structure.num_layers]
        embed = parts.model.get_input_embeddings()
        state = HeadState("", kv, None)
        head = routers.draft_head
        own: Any = {"attention": attend_static, "execute_layer": parts.execute_layer}
        return HeadRun(parts.structure, self.cache, head, embed, state, is_lazy=False, **own)

    def _run(self) -> LayerRun:
        """The run of a verify pass without the draft head."""
        own: Any = {"execute_layer": self.parts.execute_layer}
        if self.kind.tap_layers:
            return TapRun(self.parts.structure, self.cache, tap_layers=self.kind.tap_layers, **own)
        return LayerRun(self.parts.structure, self.cache, **own)

    @property
    def exit_steps(self) -> ExitSteps:
        """The steps of passes that may end at an exit layer."""
        assert self.exits is not None  # these buffers have exit layers
        return self.exits

    def load(self, source: FilledCache, mask: Tensor | None, prev_hidden_state: Tensor | None) -> None:
        """Copy in a cache, a mask (rows, length) and the head's previous hidden state.

        Cache and hidden state may have fewer rows than the buffers; they fill the first rows.
        """
        fill(self.cache, source)
        self.tensors.write_mask(mask, None)
        if prev_hidden_state is not None and self.head is not None:
            self.prev_hidden_state[: len(prev_hidden_state)] = prev_hidden_state

    def take_over(
        self, other: StepBuffers, length: int, mask: Tensor | None, rejected: Tensor | None, rows: list[int]
    ) -> None:
        """Copy `rows` (ascending) of other buffers into the first rows of these buffers; the two may share memory.

        `length` is the number of filled slots; mask and rejected slots are (rows of these buffers, length).
        """
        for own, layer in zip(self.cache.layers, other.cache.layers, strict=True):
            take_rows(own, layer, length, rows)
        self.tensors.write_mask(mask, rejected)
        if self.head is not None:
            self.last_hidden_states[: len(rows)] = other.last_hidden_states[rows]
            self.prev_hidden_state[: len(rows)] = other.prev_hidden_state[rows]

    def begin_round(self, after_passes: bool) -> None:
        """Set the hidden state that the head drafts from, once inputs are uploaded; `after_passes`: of a last pass."""
        if self.head is None:
            return
        if after_passes:
            index = self.tensors.last_accepted[:, None, None].expand(-1, 1, self.last_hidden_states.shape[-1])
            self.prev_hidden_state.copy_(self.last_hidden_states.gather(1, index))
        self.draft_hidden_state.copy_(self.prev_hidden_state)

    def advance(self) -> None:
        """Begin the next round as the host would after accepting the top-1 tokens; see `StepTensors.advance`."""
        self.tensors.advance()
        self.begin_round(after_passes=True)

    def state(self) -> list[Tensor]:
        """The tensors that a trial run of a step changes and that have to be restored."""
        changed = [self.tensors.device_inputs, *([self.draft_hidden_state] if self.head is not None else [])]
        return changed if self.exits is None else [*changed, self.exits.exit_layers, self.exits.exited_state]

    def verify(self, width: int) -> tuple[int, Tensor]:
        """Run a full-depth pass over the first `width` tokens of each row; return layers executed and logits."""
        tensors = self.tensors
        run = self.head or self._run()
        before = run.layers_executed
        if self.head is not None:
            self.head.prev_hidden_state = self.prev_hidden_state
        with active(run), reading_tree(tensors.tree(width)):
            logits = tensors.forward(tensors.ids[:, :width], tensors.start[0]).logits
        tensors.set_results(slice(None), greedy_tokens(logits))
        tensors.keep_inputs()
        if self.head is not None:
            final: Any = self.head.last_hidden_states
            self.last_hidden_states[:, :width].copy_(final)
        elif isinstance(run, TapRun):
            tapped: Any = run.tapped
            self.tapped[:, :width].copy_(tapped)
        return run.layers_executed - before, logits

    def draft(self, exit_layer: int) -> tuple[int, None]:
        """Draft one token for each row and append it to the row's tokens; return layers executed."""
        head, executed = self.head, 0
        if head is not None and exit_layer == head.exit_layer:
            top, scores = self._draft_with(head)
        else:
            top, scores, executed = self._draft_from(exit_layer)
        if self.scores is not None:
            self.scores.copy_(scores)
            self.candidates.copy_(top)
        self.tensors.num_drafted.add_(1)
        self.tensors.ids.index_copy_(1, self.tensors.num_drafted, top[:, :1])
        return executed, None

    def _draft_with(self, head: HeadRun) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens (rows, candidates) after each row's last one, by the draft head, and scores."""
        tensors, layer = self.tensors, self.cache.layers[0]
        position: Any = layer.position
        position.move_to(tensors.start[0] + tensors.num_drafted[0], 1)
        head.draft_hidden_state = self.draft_hidden_state
        with filled_up_to(position.end):
            count = TOP_DRAFTS if self.scores is not None else 1
            top, scores = head.draft(tensors.ids.index_select(1, tensors.num_drafted), tensors.mask, count)
        self.draft_hidden_state.copy_(head.draft_hidden_state)
        return top, scores

    def _draft_from(self, exit_layer: int) -> tuple[Tensor, Tensor, int]:
        """Run the layers up to an exit layer; return the tokens (rows, 1) of its head, their scores, layers run."""
        tensors, layers = self.tensors, {"execute_layer": self.parts.execute_layer}
        run = FixedDepthRun(self.parts.structure, self.cache, exit_layer, **layers)
        ids, drafted = tensors.ids.index_select(1, tensors.num_drafted), tensors.num_drafted
        with active(run):
            state = run.states_after(tensors.forward, ids, tensors.start[0] + drafted[0], drafted)[:, -1]
        routers: Any = self.parts.routers
        point = routers[exit_layer]
        top = self.parts.draft_unembed(point.head(state))[:, None]
        return top, self.parts.unembed.route(point.router, state)[:, None], run.layers_executed

    def read_draft(self) -> tuple[list[list[int]], list[list[float]]]:
        """Wait for the last draft step; return each row's likeliest tokens and their scores."""
        return self.candidates.tolist(), self.scores.tolist()  # type: ignore[union-attr]


def slots_for_now(filled: int, most: int) -> int:
    """Number of slots that growing buffers need for `filled` tokens, in a call that may later need `most` slots.

    This number plus `WIDEST` is a power of two, so that few graphs serve all calls.
    """
    slots = FIRST_SLOTS // 2
    while slots < most and (slots < FIRST_SLOTS or slots - WIDEST <= filled):
        slots *= 2
    return slots - WIDEST


def capacity_for(rows: int, slots: int, *, are_free: bool = False) -> int:
    """Capacity of the buffers for a call that may need `slots`, with room for one more pass.

    Where unfilled slots `are_free`, it is a power of two, so that the turns of a chat share buffers and graphs.
    """
    needed = slots + WIDEST + (SPARE_SLOTS if rows > 1 else 0)
    if are_free:
        return max(FIRST_SLOTS, 1 << (needed - 1).bit_length())
    return -(-needed // BUCKET) * BUCKET
