"""The tensors of steps, at fixed addresses, and the draft and verify passes that run on them.

A step runs the model's own forward on a `static_cache`. What changes from round to round (tokens, slots, positions) is
in tensors on the device, uploaded by one copy. A draft step writes its token where the next step reads it, so a chain
of draft steps and the verify pass need the host only to launch them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...base_model.inputs import without_router_loss
from ...base_model.structure import CACHE, DecoderStructure, bounds_positions
from ...base_model.unembed import DraftUnembed, Unembed, greedy_tokens
from ...depth.fused_layers import FusedLayers
from ...depth.gates import FixedDepthRun, LayerRun, active
from ...depth.head_drafting import HeadRun, HeadState
from ...routers.routers import TIDERouters
from ..gqa_attention import attend_static, filled_up_to, skipping_holes
from .exit_steps import ExitSteps
from .static_cache import fill, first_rows, static_cache, take_rows

WIDTHS = (1, 2, 4, 8, 16)  # of verify passes; passes of other widths are padded to the next larger width
WIDEST = WIDTHS[-1]
BUCKET = 256  # slots; capacities are multiples of this, so that calls share buffers and graphs
FIRST_SLOTS = 1024  # initial size of growing buffers, unless the call needs fewer slots
SPARE_SLOTS = 256  # extra slots for holes, in buffers of several rows


@dataclass(frozen=True)
class ModelParts:
    """The parts of an attached model that steps run."""

    model: Any
    structure: DecoderStructure
    unembed: Unembed
    draft_unembed: DraftUnembed
    routers: TIDERouters | None
    fused_layers: FusedLayers | None = None
    execute_layer: Any = None  # see `LayerRun`
    fill_layer: Any = None  # fills a layer's K/V from its input, and returns the input; `None`: `kv_cache.fill_skipped`

    @property
    def head_size(self) -> int:
        """Width of the hidden states that the draft head reads of the token before."""
        head = self.routers.draft_head if self.routers is not None else None
        return self.structure.hidden_size if head is None else head.config.hidden_size


class StepBuffers:
    """The tensors of all steps with the same numbers of rows and slots.

    Args:
        parts: The parts of the model that steps run.
        like: A filled cache of the model, for shapes and dtypes.
        rows: Number of sequences.
        capacity: Slots per sequence.
        position_shape: Dimensions of the model's positions before (rows, width): one for mRoPE, `()` for plain
            positions; `None` if the model takes no positions.
        has_head: Whether the draft head drafts; its K/V are then the last layer of the cache.
        has_scores: Whether the exit score of each draft token is computed.
        exit_layers: Those at which tokens may exit in `early_exit`; none in other modes.
        is_causal: Whether masks hide no more than unfilled slots and later tokens: of one row, without padding.
        skips_holes: Whether windows skip rejected tokens, which the rows of a batch leave in the cache.
        shared: A static cache of as many slots and more rows, whose first rows are used instead of new memory.
    """

    def __init__(
        self,
        parts: ModelParts,
        like: Cache,
        rows: int,
        capacity: int,
        position_shape: tuple[int, ...] | None,
        has_head: bool,
        has_scores: bool = False,
        exit_layers: tuple[int, ...] = (),
        is_causal: bool = False,
        skips_holes: bool = False,
        shared: Cache | None = None,
    ) -> None:
        self.is_causal = is_causal
        self.parts, self.rows, self.capacity, self.position_shape = parts, rows, capacity, position_shape
        self._bounds_positions = bounds_positions(parts.model.config.get_text_config())
        first: Any = like.layers[0]
        self.device = device = first.keys.device
        self.cache = static_cache(like, rows, capacity) if shared is None else first_rows(shared, rows)
        hidden, dtype = parts.head_size, first.keys.dtype
        leading = position_shape or ()
        # Start, fed, highest position, positions, last accepted, ids.
        sizes = (1, 1, 1, math.prod(leading) * rows, rows, rows * WIDEST)
        with torch.inference_mode(False):
            self._host_inputs = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
            self._device_inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
            self.mask = torch.ones((rows, capacity), dtype=torch.int64, device=device)
            self.holes = torch.zeros_like(self.mask) if skips_holes else None
            self._results = torch.zeros((rows, 2 * WIDEST), dtype=torch.int64, device=device)
            self._host_results = torch.zeros((rows, 2 * WIDEST), dtype=torch.int64, pin_memory=device.type == "cuda")
            self.scores = torch.zeros(rows, device=device) if has_scores else None
            if has_head:
                self.last_hidden_states = torch.zeros((rows, WIDEST, hidden), dtype=dtype, device=device)
                self.prev_hidden_state = torch.zeros((rows, 1, hidden), dtype=dtype, device=device)
                self.draft_hidden_state = torch.zeros_like(self.prev_hidden_state)
        inputs = self._device_inputs.split(sizes)
        self.start, self.fed, self.highest_position, positions, self.last_accepted, ids = inputs
        self.positions = positions.view(*leading, rows)
        self.ids = ids.view(rows, WIDEST)
        self.head: HeadRun | None = self._head_run() if has_head else None
        self.exits = ExitSteps(self, exit_layers) if exit_layers else None

    def _head_run(self) -> HeadRun | None:
        parts, routers = self.parts, self.parts.routers
        if routers is None or routers.draft_head is None:
            return None
        kv: Any = self.cache.layers[parts.structure.num_layers]
        embed = parts.model.get_input_embeddings()
        state = HeadState("", kv, None)
        head = routers.draft_head
        return HeadRun(parts.structure, self.cache, head, embed, state, is_lazy=False, attention=attend_static)

    @property
    def exit_steps(self) -> ExitSteps:
        """The steps of passes that may end at an exit layer."""
        assert self.exits is not None  # these buffers have exit layers
        return self.exits

    def load(self, source: Cache, length: int, mask: Tensor | None, prev_hidden_state: Tensor | None) -> None:
        """Copy in a cache of `length` tokens, a (rows, length) mask and the head's previous hidden state.

        Cache and hidden state may have fewer rows than the buffers; they fill the first rows.
        """
        fill(self.cache, source, length)
        self.write_mask(mask, None)
        if prev_hidden_state is not None and self.head is not None:
            self.prev_hidden_state[: len(prev_hidden_state)] = prev_hidden_state

    def take_over(
        self, other: StepBuffers, length: int, mask: Tensor | None, holes: Tensor | None, rows: list[int]
    ) -> None:
        """Copy `rows` (ascending) of other buffers into the first rows of these buffers; the two may share memory.

        `length` is the number of filled slots; mask and holes are (rows of these buffers, length).
        """
        for own, layer in zip(self.cache.layers, other.cache.layers, strict=True):
            take_rows(own, layer, length, rows)
        self.write_mask(mask, holes)
        if self.head is not None:
            self.last_hidden_states[: len(rows)] = other.last_hidden_states[rows]
            self.prev_hidden_state[: len(rows)] = other.prev_hidden_state[rows]

    def write_mask(self, mask: Tensor | None, holes: Tensor | None, start: int = 0) -> None:
        """Upload a (rows, length) attention mask and holes from the CPU, from slot `start` on; `None`: none."""
        for buffer, found, default in ((self.mask, mask, 1), (self.holes, holes, 0)):
            if buffer is None:
                continue
            if start == 0:
                buffer.fill_(default)
            if found is not None:
                buffer[:, start : found.shape[1]].copy_(found[:, start:], non_blocking=True)

    def write(
        self,
        start: int,
        positions: list[list[int]],
        highest_position: int,
        ids: list[list[int]],
        accepted: list[int] | None,
    ) -> None:
        """Upload the inputs of a round by one asynchronous copy; `start` is the slot of the first token.

        `positions` has that token's position in each row (several for mRoPE); `highest_position` is what those of
        padding are cut to, where higher ones do harm; `ids` has each row's last token and draft; `accepted` the number
        of tokens that each row accepted in the previous pass, `None` before the first pass.
        """
        padded = [token for row in ids for token in row + row[-1:] * (WIDEST - len(row))]
        last = [max(0, count - 1) for count in accepted] if accepted is not None else [0] * self.rows
        by_kind = [position for kind in zip(*positions, strict=True) for position in kind]
        self._host_inputs.copy_(torch.tensor([start, 0, highest_position, *by_kind, *last, *padded]))
        self._device_inputs.copy_(self._host_inputs, non_blocking=True)
        if self.head is not None:
            if accepted is not None:
                index = self.last_accepted[:, None, None].expand(-1, 1, self.last_hidden_states.shape[-1])
                self.prev_hidden_state.copy_(self.last_hidden_states.gather(1, index))
            self.draft_hidden_state.copy_(self.prev_hidden_state)

    def replace_top_tokens(self, rows: slice | list[int], tokens: Tensor) -> None:
        """Put these tokens, (rows, width), in the place of the last pass's top-1 tokens."""
        self._results[rows, : tokens.shape[1]] = tokens

    def read(self, before_waiting: Callable[[], None] | None) -> list[list[int]]:
        """Wait for the round; return each row's top-1 tokens and, from index `WIDEST` on, its input tokens.

        `before_waiting` may launch passes that overwrite these results on the device.
        """
        self._host_results.copy_(self._results, non_blocking=True)
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        if before_waiting is not None:
            before_waiting()
        if copied is not None:
            copied.synchronize()
        return self._host_results.tolist()

    def advance(self) -> None:
        """Make each row's top-1 token after its first one the input of the next pass, without the host."""
        self.start.add_(1)
        self.positions.add_(1)
        self.ids[:, 0] = self._results[:, 0]
        if self.head is not None:
            self.prev_hidden_state.copy_(self.last_hidden_states[:, :1])

    def state(self) -> list[Tensor]:
        """The tensors that a trial run of a step changes and that have to be restored."""
        changed = [self._device_inputs, *([self.draft_hidden_state] if self.head is not None else [])]
        return changed if self.exits is None else [*changed, self.exits.exit_layers, self.exits.exited_state]

    def verify(self, width: int) -> tuple[int, Tensor]:
        """Run a full-depth pass over the first `width` tokens of each row; return layers executed and logits."""
        run = self.head or LayerRun(self.parts.structure, self.cache)
        run.execute_layer = self.parts.execute_layer
        before = run.layers_executed
        if self.head is not None:
            self.head.prev_hidden_state = self.prev_hidden_state
        with active(run):
            logits = self.forward(self.ids[:, :width], self.start[0]).logits
        self._results[:, :width] = greedy_tokens(logits)
        self._results[:, WIDEST:] = self.ids
        if self.head is not None:
            final: Any = self.head.last_hidden_states
            self.last_hidden_states[:, :width].copy_(final)
        return run.layers_executed - before, logits

    def draft(self, exit_layer: int) -> tuple[int, None]:
        """Draft one token for each row and append it to the row's tokens; return layers executed."""
        head, executed = self.head, 0
        if head is not None and exit_layer == head.exit_layer:
            top = self._draft_with_head()
        else:
            top, executed = self._draft_from(exit_layer)
        self.fed.add_(1)
        self.ids.index_copy_(1, self.fed, top[:, None])
        return executed, None

    def draft_logits(self, _exit_layer: int) -> tuple[int, Tensor]:
        """Run the draft head for one more token of each row, which `feed` gives; return layers executed and logits."""
        logits = self._run_head(HeadRun.draft_logits)
        self.fed.add_(1)
        return 0, logits

    def _draft_with_head(self) -> Tensor:
        """Return the tokens (rows) that the draft head drafts."""
        top, scores = self._run_head(HeadRun.draft)
        if self.scores is not None:
            self.scores.copy_(scores)
        return top

    def _run_head(self, method: Callable[[HeadRun, Tensor, Tensor], Any]) -> Any:
        """Run the draft head over each row's last token."""
        head = self.head
        assert head is not None
        position: Any = self.cache.layers[0].position
        position.move_to(self.start[0] + self.fed[0], 1)
        head.draft_hidden_state = self.draft_hidden_state
        with filled_up_to(position.end):
            found = method(head, self.ids.index_select(1, self.fed), self.mask)
        self.draft_hidden_state.copy_(head.draft_hidden_state)
        return found

    def _draft_from(self, exit_layer: int) -> tuple[Tensor, int]:
        """Run the layers up to an exit layer; return the tokens (rows) that its head drafts, and layers executed."""
        run = FixedDepthRun(self.parts.structure, self.cache, exit_layer)
        run.execute_layer = self.parts.execute_layer
        ids = self.ids.index_select(1, self.fed)
        with active(run):
            state = run.states_after(self.forward, ids, self.start[0] + self.fed[0], self.fed)[:, -1]
        routers: Any = self.parts.routers
        point = routers[exit_layer]
        top = self.parts.draft_unembed(point.head(state))
        if self.scores is not None:
            self.scores.copy_(self.parts.unembed.route(point.router, state))
        return top, run.layers_executed

    def feed(self, num_fed: int, tokens: list[int]) -> None:
        """Set the draft token of each row that `num_fed` draft steps led to, from which the next one continues."""
        self.ids[:, num_fed] = torch.tensor(tokens, device=self.device)

    def read_draft(self) -> tuple[list[int], list[float]]:
        """Wait for the last draft step; return each row's token and its exit score."""
        return self.ids[:, int(self.fed)].tolist(), self.scores.tolist()  # type: ignore[union-attr]

    def forward(self, ids: Tensor, start: Tensor, fed: Tensor | int = 0) -> Any:
        """Run the model over (rows, width) tokens from slot `start` on, `fed` tokens after the first one."""
        width = ids.shape[1]
        self.cache.layers[0].position.move_to(start, width)
        inputs = {"input_ids": ids, "attention_mask": self.mask, CACHE: self.cache, "use_cache": True}
        if self.position_shape is not None:
            positions = self.positions[..., None] + torch.arange(width, device=self.device) + fed
            if self._bounds_positions:
                positions = torch.minimum(positions, self.highest_position)
            inputs["position_ids"] = positions
        with skipping_holes(self.holes):
            return self.parts.model(**without_router_loss(self.parts.model, inputs), return_dict=True)


def slots_for_now(filled: int, most: int) -> int:
    """Number of slots that growing buffers need for `filled` tokens, in a call that may later need `most` slots.

    This number plus `WIDEST` is a power of two, so that few graphs serve all calls.
    """
    slots = FIRST_SLOTS // 2
    while slots < most and (slots < FIRST_SLOTS or slots - WIDEST <= filled):
        slots *= 2
    return slots - WIDEST


def capacity_for(rows: int, slots: int) -> int:
    """Capacity of the buffers for a call that may need `slots`, with room for one more pass."""
    needed = slots + WIDEST + (SPARE_SLOTS if rows > 1 else 0)
    return -(-needed // BUCKET) * BUCKET
