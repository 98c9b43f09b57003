"""The static engine: steps of fixed shape on a static cache; on GPUs, one upload and one read per round.

The eager engine runs prefill into the call's own cache, which is then copied into the static cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..base_model.structure import last_position
from ..common.errors import UnsupportedOptionError
from ..depth.linear_gate import PROMPT_LAYOUTS, allowed_layouts
from ..kernels.cpu.attention import MIN_QUERIES, is_faster
from ..kernels.cpu.cpp_kernels import DTYPES, are_ready, build_kernels
from ..speculation.engine import Engine
from ..speculation.policy import CostTable, step_width
from .eager import EagerEngine
from .exit_passes import ExitPasses, StepsHeldError
from .gqa_attention import can_skip_holes, gqa_attention
from .steps.static_cache import StaticCacheSlots, give_back
from .steps.step_buffers import WIDEST, ModelParts, StepBuffers, slots_for_now
from .steps.step_compiler import CompiledPrefill
from .steps.step_store import StepStore

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RowMap:
    """Maps sequences to rows of buffers, which may have more rows than there are sequences.

    Shapes are fixed, so every row runs in every step. A row without an unfinished sequence gets the inputs of the
    first unfinished sequence, which are valid for the model, and the row's results are ignored. `own` has the rows of
    the unfinished sequences, in ascending order.
    """

    def __init__(self, num_sequences: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self.own = list(range(num_sequences))

    @property
    def shown(self) -> list[int]:
        """For each row, the index of the unfinished sequence whose inputs the row gets."""
        numbers = {row: number for number, row in enumerate(self.own)}
        return [numbers.get(row, 0) for row in range(self.num_rows)]

    def spread(self, values: Sequence[T]) -> list[T]:
        """Map one value per sequence to one per row."""
        return [values[number] for number in self.shown]

    def gather(self, found: Sequence[T]) -> list[T]:
        """Map one value per row to one per sequence."""
        return [found[row] for row in self.own]

    def select(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences."""
        self.own = [self.own[number] for number in sequences]


class StaticEngine:
    """Runs one call on steps of fixed shape, after an eager prefill.

    Rows that have stopped still run in every step, unless steps for fewer rows exist already. The eager engine
    `eager` runs prefill, or the whole call if the steps are not available. In `early_exit` with exit layers, `exits`
    runs passes in place of verify steps; the whole call then needs steps, and raises [`StepsHeldError`] or
    [`UnsupportedOptionError`] without them.
    """

    def __init__(self, eager: EagerEngine, steps: StepStore, exits: ExitPasses | None = None) -> None:
        self.eager, self.steps, self.exits = eager, steps, exits
        self.name, self.temperature = eager.name, eager.temperature
        self.widths, self.reads_drafts = steps.widths, steps.reads_drafts
        self.last_tokens: list[int] = []  # each row's last token, the next pass's input
        self._has_steps = False
        self._buffers: StepBuffers | None = None
        self._slots: Any = None  # StaticCacheSlots, after prefill
        self._rows: Any = None  # RowMap, after prefill
        self._position_shape: tuple[int, ...] | None = None
        self._is_causal = self._skips_holes = False  # see `StepBuffers`
        self._positions: list[list[int]] = []  # each row's next position; several for mRoPE
        self._highest_position = 0  # that the answer reaches
        self._added: list[int] = []  # number of tokens that each row has added after prefill
        self._room = 0  # maximum number of tokens that a row may add after prefill
        self._accepted: list[int] | None = None  # number of tokens that each row accepted in the last pass
        self._layers = 0
        self._num_fed = 0  # number of draft steps since the last rollback
        # Exit layer and number of the draft steps whose tokens are unread, and timestamps before and after these steps.
        self._unread: tuple[int, int, Any, Any] | None = None
        self._compactions, self._masked = 0, 0  # number of compactions, and of slots, when the mask was written
        self._width, self._started = 0, 0.0
        self._drafted: list[list[int]] = []
        self._logits: Any = None
        self._results: list[list[int]] | None = None
        self._prepared_before = 0  # number of steps prepared before this round
        self._ahead: int | None = None  # the number of compactions when the next pass was started, if it was
        self._read_at = 0.0  # when the last results had been read

    @property
    def _text_config(self) -> Any:
        return self.eager.model.config.get_text_config()

    @property
    def layers_executed(self) -> int:
        """Decoder layers executed, counted once per row and pass."""
        return self.eager.layers_executed + self._layers

    @property
    def head_layer(self) -> int | None:
        """Exit layer of the head with K/V of its own; see `DraftEngine.head_layer`."""
        return self.eager.head_layer

    @property
    def free_slots(self) -> int | None:
        """How many draft tokens learned position embeddings still allow; `None` without such a limit."""
        last = self.eager.last_slot
        return None if last is None else max(0, last - self._slots.length - 1)

    @property
    def buffers(self) -> StepBuffers:
        """The buffers, which exist after prefill."""
        assert self._buffers is not None
        return self._buffers

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of steps over all rows of the buffers, since rows without a sequence run too."""
        return self.eager.attachment.costs_of(self.buffers.rows, self.name, self.widths)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the lock on the steps, unless another call holds it; see `Engine.running`."""
        with self.steps.held() as self._has_steps:
            if self.exits is not None and not self._has_steps:
                raise StepsHeldError
            with self.eager.running():
                yield

    def decoding(self) -> AbstractContextManager[None]:
        """See `EagerEngine.decoding`."""
        return self.eager.decoding()

    def prefill(self) -> Tensor:
        """Run prefill, with compiled layers and kernels where available."""
        if not self._has_steps:
            return self.eager.prefill()
        self.steps.refresh(self._parts)
        with nullcontext() if self.steps.prompts is None else self._compiled_layers(self.steps.prompts):
            return self.eager.prefill()

    def begin(self, tokens: list[int]) -> None:
        """Set each row's first generated token."""
        self.eager.begin(tokens)

    def decoder(self, room: int) -> Engine:
        """This engine, or the eager engine if the call cannot run on steps or another call holds the steps."""
        engine = self._decoder(room)
        if self.exits is not None and engine is not self:
            raise UnsupportedOptionError(
                "early_exit cannot run on steps of fixed shape here",
                got="no memory for them, or a cache or positions that they do not have",
                expected="a model that the compiled engine supports, and memory for a static cache",
                do="Pass tide_engine='eager' in this call.",
            )
        return engine

    def _decoder(self, room: int) -> Engine:
        eager = self.eager
        if not self._has_steps:
            return eager
        cache, mask, positions = eager.slots.cache, eager.slots.mask, eager.positions
        if not all(getattr(layer, "is_initialized", True) for layer in cache.layers):
            logger.info("the call runs eagerly after prefill: some cache layers are empty")
            return eager
        if positions is not None:  # let the model prepare positions, since PaliGemma counts from 1
            last = eager.input_ids.new_tensor([[token] for token in eager.last_tokens])
            positions = eager.inputs_of(last).get("position_ids")
            if positions is None:
                logger.info("the call runs eagerly after prefill: the model computes positions by itself")
                return eager
            positions = positions[..., 0]
        self._position_shape = None if positions is None else tuple(positions.shape[:-1])
        rows, length = len(eager.last_tokens), int(cache.get_seq_length())
        mask = mask.cpu() if mask is not None else None
        self._is_causal = self.steps.reads_lengths and rows == 1 and (mask is None or bool(mask.all()))
        self._is_causal &= not eager.slots.has_windows
        self._skips_holes = rows > 1 and eager.slots.has_windows and can_skip_holes(eager.model)
        self.last_tokens, self._added, self._room = list(eager.last_tokens), [0] * rows, room
        needed = self._buffers_needed(cache, length)
        if not self.steps.fits(**needed):
            return eager
        self._buffers = buffers = self.steps.buffers(**needed)
        self._rows = RowMap(rows, buffers.rows)
        mask = mask[self._rows.shown] if mask is not None else None
        buffers.load(cache, length, mask, eager.head.prev_hidden_state if eager.head is not None else None)
        threshold, cpu = eager.slots.compaction_threshold, torch.device("cpu")
        compacts = eager.slots.has_windows and not self._skips_holes
        self._slots = StaticCacheSlots(buffers.cache, length, mask, threshold, cpu, has_windows=compacts)
        self._masked = length
        self._positions = [[0]] * rows if positions is None else positions.reshape(-1, rows).T.tolist()
        self._highest_position = max(map(max, self._positions)) + room - 1
        self._prepared_before = self.steps.warm_up.num_prepared
        return self

    def draft(self, exit_layer: int, drafted: list[list[int]]) -> tuple[list[int], list[float]]:
        """Draft one token for each row, with one step for each token that the exit layer has not processed."""
        start, num_steps = perf_counter(), len(drafted[0]) + 1 - self._num_fed
        for _ in range(num_steps):
            self._run_draft_step("draft", exit_layer, drafted)
        tokens, scores = self.buffers.read_draft()
        if self._is_warm:
            milliseconds = (perf_counter() - start) * 1000 / num_steps
            self.costs_of(len(drafted)).record(("draft", exit_layer), milliseconds, num_steps)
        return self._rows.gather(tokens), self._rows.gather(scores)

    def draft_logits(self, drafted: list[list[int]]) -> Tensor:
        """Logits of the draft head; see `DraftEngine.draft_logits`."""
        head = self.eager.head
        assert head is not None  # `head_layer` is 0
        logits = self._run_draft_step("draft_logits", head.exit_layer, drafted)[self._own]
        return head.head.whole_vocab(logits, self.eager.attachment.structure.vocab_size)

    def _run_draft_step(self, kind: str, exit_layer: int, drafted: list[list[int]]) -> Any:
        """Run the next draft step of this round, from the last token or from one of `drafted`; return its logits."""
        if self._num_fed == 0:
            self.upload([[token] for token in self.last_tokens])
        else:
            tokens = [tokens[self._num_fed - 1] for tokens in drafted]
            self.buffers.feed(self._num_fed, self._rows.spread(tokens))
        self._num_fed += 1
        return self.run_step(kind, exit_layer)

    def draft_unread(self, exit_layer: int, num_tokens: int) -> None:
        """Start a chain of draft steps whose tokens are read only when they are verified."""
        self._started = perf_counter()
        self.upload([[token] for token in self.last_tokens])
        before = _timestamp(self.buffers.device)
        for _ in range(num_tokens):
            self.run_step("draft", exit_layer)
        self._unread = exit_layer, num_tokens, before, _timestamp(self.buffers.device)

    def rollback(self) -> None:
        """Drop the drafts; the verify pass overwrites their K/V."""
        self._num_fed = 0

    def verify(self, drafted: list[list[int]]) -> None:
        """Run one full-depth pass, padded to the next width that has a step."""
        self._drafted, self._results = drafted, None
        self._width = step_width(1 + max(map(len, drafted)), self.widths)
        if self.exits is not None:
            self._logits = self.exits.run(self)
            return
        if self._ahead == self._slots.num_compactions and not any(drafted):
            self._ahead, self._started = None, self._read_at
            return
        if self._unread is None:
            self._started = perf_counter()
            self.upload([[last, *tokens] for last, tokens in zip(self.last_tokens, drafted, strict=True)])
        self._logits = self.run_step("verify", self._width)

    def drafted(self) -> list[list[int]] | None:
        """The draft tokens of the last pass; `None` if the drafter has read them already."""
        if self._unread is None:
            return None
        lengths = map(len, self._drafted)
        return [found[WIDEST + 1 :][:length] for found, length in zip(self._read(), lengths, strict=True)]

    def logits(self) -> Tensor:
        """(rows, width, vocabulary) logits of the last pass."""
        return self._logits[self._own]

    def depths(self) -> list[int] | None:
        """For each row, after how many layers its token was chosen; `None`: after all layers."""
        return None if self.exits is None else self.exits.exits

    def inputs(self) -> Tensor:
        """(rows, up to `WIDEST`) tokens that the last pass read, and padding."""
        first = 0 if self.exits is None else self.exits.current
        return self.buffers.ids[self._own, first:]

    def run_step(self, kind: str, size: Any) -> Any:
        """Run a step; return its logits."""
        step = self.steps.run(self.buffers, kind, size)
        self._layers += step.num_layers
        return step.logits

    def read_exits(self) -> list[int]:
        """Wait for a segment of a pass; return the exit layer of each row, the number of layers if it has none."""
        self.steps.reads += 1
        return self._rows.gather(self.buffers.exit_steps.read())

    def top_tokens(self, chosen: Tensor | None = None, *, runs_ahead: bool = False) -> list[list[int]]:
        """The top-1 token at each position, or the `chosen` one, which is read with the rest."""
        if chosen is not None:
            self.buffers.replace_top_tokens(self._own, chosen)
        return self._read(self._run_ahead if runs_ahead and self._may_run_ahead() else None)

    def _may_run_ahead(self) -> bool:
        """Whether the next pass may start before the host has read this one, which gives each row one token."""
        is_apart = not self.reads_drafts and self.exits is None and not self.eager.is_returned
        most, table = self._slots.cache.layers[0].get_max_length(), last_position(self._text_config)
        is_last = min(self._added) + 2 > self._room or max(map(max, self._positions)) + 2 > (table or math.inf)
        return is_apart and self._width == 1 and not is_last and self._slots.length + 2 <= most

    def _run_ahead(self) -> None:
        """Start the next pass, without drafts. It is dropped if there are drafts after all: see `upload`."""
        self.buffers.advance()
        self._logits = self.run_step("verify", 1)
        self._ahead = self._slots.num_compactions

    def commit(self, new_tokens: list[list[int]]) -> None:
        """Keep the K/V of the accepted tokens of the last pass; see `Engine.commit`."""
        if self.exits is not None:
            self.exits.commit(self.last_tokens)
        self._accepted = accepted = [len(tokens) for tokens in new_tokens]
        self._slots.commit(self._width, self._rows.spread(accepted))
        moved = zip(self._positions, accepted, strict=True)
        self._positions = [[position + count for position in kinds] for kinds, count in moved]
        self._added = [before + count for before, count in zip(self._added, accepted, strict=True)]
        self.last_tokens = [
            tokens[-1] if tokens else last for last, tokens in zip(self.last_tokens, new_tokens, strict=True)
        ]
        milliseconds = self._without_drafts((perf_counter() - self._started) * 1000)
        if self._is_warm and self.exits is None:  # a pass that may end early says nothing of full ones
            self.costs_of(len(accepted)).record(("verify", self._width), milliseconds)
        self._prepared_before = self.steps.warm_up.num_prepared

    def select(self, rows: list[int]) -> None:
        """Keep only these sequences: move them to existing smaller buffers, or else ignore the other rows."""
        if self.exits is not None:
            self.exits.select(self, rows)
        if self._buffers is None:
            self.eager.select(rows)
            return
        self._rows.select(rows)
        self.last_tokens = [self.last_tokens[row] for row in rows]
        self._positions = [self._positions[row] for row in rows]
        self._added = [self._added[row] for row in rows]
        self._accepted = None if self._accepted is None else [self._accepted[row] for row in rows]
        smaller = self.steps.smaller(self.buffers, len(rows)) if self._ahead is None else None
        if smaller is not None:
            self._move_to(smaller)
        else:
            self._slots.show(self._rows.spread(self._rows.own))

    def finish(self, settle: bool) -> Any:
        """Copy the K/V back to the call's own cache, if the caller receives that cache; see `Engine.finish`."""
        eager = self.eager
        if self._buffers is not None and eager.is_returned:
            if self.exits is not None:
                self.exits.catch_up(self)
            self._slots.settle()
            give_back(self.buffers.cache, eager.slots.cache, self._slots.length)
            if eager.head is not None and self._accepted is not None:
                eager.head.continue_from(self.buffers.last_hidden_states, self._accepted)
        return eager.finish(settle)

    @property
    def _own(self) -> slice | list[int]:
        """The rows of the unfinished sequences as an index, which the device gets as a list only if there are gaps."""
        own = self._rows.own
        return slice(len(own)) if own[-1] == len(own) - 1 else own

    @property
    def _is_warm(self) -> bool:
        """Whether no step was prepared in this round, so that the measured time is that of the passes alone."""
        return self.steps.warm_up.num_prepared == self._prepared_before

    def _read(self, before_waiting: Callable[[], None] | None = None) -> list[list[int]]:
        """The results of this round for each sequence; the first call in a round waits for the device."""
        if self._results is None:
            self._results = self._rows.gather(self.steps.read(self.buffers, before_waiting))
            self._read_at = perf_counter()
        return self._results

    def upload(self, ids: list[list[int]], back: int = 0) -> None:
        """Upload the inputs of the round, which begin `back` tokens before the next one."""
        if self._ahead is not None:  # the pass that has run ahead is dropped: it has moved the head's hidden states
            self._ahead = self._accepted = None
        if not back and not self._slots.make_room(WIDEST):  # continue in buffers with more slots
            self._move_to(self.steps.buffers(**self._buffers_needed(self.buffers.cache, self._slots.length)))
        is_compacted = self._slots.num_compactions > self._compactions
        if self._slots.holes is not None or is_compacted:
            start = 0 if is_compacted else self._masked
            self.buffers.write_mask(self._slots.mask, self._slots.holes, start)
            self._compactions, self._masked = self._slots.num_compactions, self._slots.length
        spread, highest = self._rows.spread, self._check_positions()
        accepted = None if self._accepted is None else spread(self._accepted)
        positions = [[position - back for position in kinds] for kinds in self._positions] if back else self._positions
        self.buffers.write(self._slots.length - back, spread(positions), highest, spread(ids), accepted)

    def _check_positions(self) -> int:
        """Raise if a row has reached a position that the model does not have; return the highest one of this round.

        Fixed shapes need a position for padding as well, so an index beyond the table raises no error by itself.
        """
        table = last_position(self._text_config)
        if table is None or self._position_shape is None:
            return self._highest_position
        reached = min(max(map(max, self._positions)), self._highest_position)  # a stopped row may be one beyond
        if reached >= table:
            raise UnsupportedOptionError(
                "the answer is longer than the model has learned positions for",
                got=f"a token at position {reached}",
                expected=f"positions below {table}",
                do="Pass a smaller max_new_tokens, or a shorter prompt.",
            )
        return min(self._highest_position, table - 1)

    def _without_drafts(self, milliseconds: float) -> float:
        """Record the time of the draft steps that `draft_unread` ran; return the round's `milliseconds` without it."""
        if self._unread is None:
            return milliseconds
        exit_layer, num_tokens, before, after = self._unread
        drafts = before.elapsed_time(after) if isinstance(before, torch.cuda.Event) else (after - before) * 1000
        if self._is_warm:
            self.costs_of(len(self.last_tokens)).record(("draft", exit_layer), drafts / num_tokens, num_tokens)
        self._unread = None
        return max(0.0, milliseconds - drafts)

    def _parts(self) -> ModelParts:
        tide = self.eager.attachment
        return ModelParts(
            self.eager.model, tide.structure, tide.unembed, tide.draft_unembed(), tide.routers, tide.fused_layers
        )

    @contextmanager
    def _compiled_layers(self, prompts: CompiledPrefill) -> Iterator[None]:
        """Run prefill with compiled layers and kernels, whose compilation counts as warm-up."""
        dtype = self.eager.model.dtype
        if dtype in DTYPES and not are_ready(dtype):
            start = perf_counter()
            build_kernels(dtype)
            self.steps.warm_up.add(0, perf_counter() - start)
        if self.eager.input_ids.shape[1] >= MIN_QUERIES:
            is_faster(dtype)  # measured here, outside of any trace
        self.eager.run.execute_layer = prompts.run
        try:
            with gqa_attention(self.eager.model), allowed_layouts(PROMPT_LAYOUTS):
                yield
        finally:
            self.eager.run.execute_layer = None

    def _buffers_needed(self, like: Cache, filled: int) -> dict[str, Any]:
        """The arguments of `StepStore.buffers` for the unfinished sequences."""
        most = filled + self._room - min(self._added)  # `filled` includes the tokens of a cache that the caller passed
        return {
            "like": like,
            "rows": len(self.last_tokens),
            "slots": slots_for_now(filled, most) if self.steps.grows else most,
            "position_shape": self._position_shape,
            "has_head": self.eager.head is not None,
            "has_scores": self.reads_drafts,
            "is_causal": self._is_causal,
            "skips_holes": self._skips_holes,
            "exit_layers": () if self.exits is None else self.exits.kept_layers,
        }

    def _move_to(self, buffers: StepBuffers) -> None:
        """Continue the unfinished sequences in other buffers."""
        slots, own, other = self._slots, self._rows.own, self.buffers
        self._rows = RowMap(len(own), buffers.rows)
        slots.show(self._rows.spread(own))
        buffers.take_over(other, slots.length, slots.mask, slots.holes, own)
        slots.cache, self._buffers = buffers.cache, buffers


def _timestamp(device: torch.device) -> Any:
    """Record a timestamp on the device, without synchronising."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
