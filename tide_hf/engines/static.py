"""The static engine: steps of fixed shape on a static cache; on GPUs, one upload and one read per round.

The eager engine's prefill fills the call's own cache, which is then copied into the static cache (`static_prefill`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..base_model.unembed import top_tokens
from ..depth.head_drafting import HeadRun
from ..kernels.flash_decode import MANY_SLOTS
from ..speculation.drafts import Accepted, Draft
from ..speculation.policy import TOP_DRAFTS, CostTable
from .eager import EagerEngine
from .exit_passes import ExitPasses
from .round_clock import RoundClock, timestamp
from .running_ahead import PLAIN, Plan, RunningAhead
from .step_rows import StepRows
from .steps.static_cache import FilledCache, StaticCacheSlots, copy_back
from .steps.step_buffers import StepBuffers
from .steps.step_store import StepStore
from .steps.step_tensors import WIDEST

UNREAD = -1  # stands for a draft token that the host has not read


@dataclass
class StaticPass:
    """See [`Pass`]. The host waits for the device when tokens, or drafts that it has not read, are first asked for."""

    width: int
    depths: list[int]
    _index: slice | list[int]  # of the rows of the batch
    _logits: Tensor
    _ids: Tensor  # (rows, at least width) that the pass has read
    _drafts: list[Draft]
    # Each row's tokens, and from `WIDEST` on those it has read. The flag: whether the tokens accepted are top-1 ones.
    _read: Callable[[Tensor | None, bool], list[list[int]]]
    _results: list[list[int]] | None = None

    @property
    def has_trees(self) -> bool:
        """Whether a row's draft has siblings."""
        return not all(draft.is_chain for draft in self._drafts)

    @property
    def logits(self) -> Tensor:
        """(rows, width, vocabulary)."""
        return self._logits[self._index][:, : self.width]

    @property
    def inputs(self) -> Tensor:
        """(rows, width) tokens that the pass has read."""
        return self._ids[self._index, : self.width]

    @property
    def drafts(self) -> list[Draft]:
        """What each row's pass has verified."""
        if any(UNREAD in draft.tokens for draft in self._drafts):
            if self._results is None:
                self._results = self._read(None, False)
            self._drafts = [
                draft.with_tokens(found[WIDEST + 1 :][: len(draft.nodes)])
                for draft, found in zip(self._drafts, self._results, strict=True)
            ]
        return self._drafts

    def tokens(self, chosen: Tensor | None = None) -> list[list[int]]:
        """Read the top-1 token at each position, or those `chosen`, and more beyond the width."""
        if self._results is None:
            self._results = self._read(chosen, chosen is None)
        return self._results


class StaticEngine:
    """Runs the rounds of one call on steps of fixed shape, which the call holds from its prefill on.

    Rows that have stopped still run in every step, unless steps for fewer rows exist already. In `early_exit` with exit
    layers, `exits` runs passes in place of verify steps.

    Args:
        eager: The engine that the call's prefill gave. It gets the cache back in the end.
        steps: The steps of the model.
        exits: The passes of `early_exit`, if tokens may exit.
        rows: The sequences in the rows of the buffers.
        filled: The cache that prefill has filled.
        buffers: For its rows, to be filled.
    """

    def __init__(
        self,
        eager: EagerEngine,
        steps: StepStore,
        exits: ExitPasses | None,
        rows: StepRows,
        filled: FilledCache,
        buffers: StepBuffers,
    ) -> None:
        self.eager, self.steps, self.exits, self.rows, self.buffers = eager, steps, exits, rows, buffers
        self.name, self.reads_drafts, self.takes_trees = eager.name, steps.reads_drafts, buffers.kind.takes_trees
        mask, length = eager.slots.mask, filled.length
        rows.move(buffers.rows)
        mask = mask.cpu()[rows.sequences] if mask is not None else None
        buffers.load(filled, mask, eager.head.prev_hidden_state if eager.head is not None else None)
        self._slots = StaticCacheSlots(
            buffers.cache,
            length,
            mask,
            eager.slots.compaction_threshold,
            torch.device("cpu"),
            has_windows=eager.slots.has_windows and not buffers.kind.skips_rejected,
        )
        self._compactions, self._masked = 0, length  # number of compactions, and of slots, when the mask was written
        is_apart = not self.reads_drafts and exits is None and not eager.is_returned
        self._ahead = RunningAhead(is_apart)
        self._clock = RoundClock(self.costs_of, num_prepared=lambda: steps.warm_up.num_prepared)
        self._lazy_head = eager.head if buffers.kind.tap_layers else None
        self._layers = 0
        self._num_drafted = 0  # draft steps since the last pass
        self._plan: Plan = PLAIN  # of this round, if the host does not read drafts
        self._drafts_at: tuple[Any, Any] = None, None  # timestamps before and after its draft steps
        self._width = 0  # of the last pass; 0 after prefill
        self._logits: Any = None
        self._inputs: list[list[int]] = []  # the tokens that the last pass read

    @property
    def layers_executed(self) -> int:
        """Decoder layers executed, counted once per row and pass."""
        return self.eager.layers_executed + self._layers

    @property
    def head_layer(self) -> int | None:
        """Exit layer of the head with K/V of its own; see `DraftEngine.head_layer`."""
        return self.eager.head_layer

    @property
    def max_draft_tokens(self) -> int:
        """How many draft tokens the widest step and learned position embeddings allow."""
        last, widest = self.eager.last_slot, self.steps.widths[-1] - 1
        return widest if last is None else min(widest, max(0, last - self._slots.length - 1))

    @property
    def last_tokens(self) -> list[int]:
        """Each row's last token, the next pass's input."""
        return self.rows.last_tokens

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of steps over all rows of the buffers, since rows without a sequence run too."""
        attachment, buffers = self.eager.attachment, self.buffers
        reads_again = buffers.kind.is_causal and buffers.capacity > MANY_SLOTS
        reads_once = buffers.device.type != "cpu" and not reads_again
        return attachment.costs_of(buffers.rows, self.name, reads_once, self.steps.widths)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the steps to the end; see `Engine.running`."""
        try:
            with self.eager.running():
                yield
        finally:
            self.steps.let_go(self.buffers.device)

    def draft(
        self, exit_layer: int, drafted: list[list[int]], num_tokens: int = 1
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draft tokens for each row, with one step for each token that the exit layer has not processed.

        See `DraftEngine.draft`.
        """
        self._clock.begin()
        if exit_layer != self.head_layer:
            self.eager.attachment.exit_point(exit_layer)  # raises if there is no such head
        elif self._lazy_head is not None:
            return self._draft_apart(self._lazy_head, drafted)
        if not self.reads_drafts:
            return self._draft_unread(exit_layer, num_tokens)
        num_steps = len(drafted[0]) + 1 - self._num_drafted
        for _ in range(num_steps):
            if self._num_drafted == 0:
                self.upload([[token] for token in self.last_tokens])
            else:
                tokens = [tokens[self._num_drafted - 1] for tokens in drafted]
                self.buffers.tensors.write_draft(self._num_drafted, self.rows.to_rows(tokens))
            self._num_drafted += 1
            self.run_step("draft", exit_layer)
        found, scores = self.buffers.read_draft()
        self._clock.end_draft(exit_layer, len(drafted), num_steps)
        return self.rows.from_rows(found), self.rows.from_rows(scores)

    def _draft_apart(self, head: HeadRun, drafted: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Draft a token with a head that runs apart from steps, for a single row."""
        is_usual, tokens = head.num_pending <= 1, [*self.last_tokens, *drafted[0]][self._num_drafted :]
        mask = self._slots.mask_for(self._num_drafted + 1)
        top, scores = head.draft(torch.tensor([tokens]), mask, TOP_DRAFTS)
        self._num_drafted += len(tokens)
        self._clock.end_draft(head.exit_layer, 1, is_usual=is_usual and len(tokens) == 1)
        return top.tolist(), scores.tolist()

    def likeliest(self) -> list[tuple[list[int], list[list[int]]]]:
        """See `DraftEngine.likeliest`."""
        if self._width == 0 or not self.reads_drafts or self.exits is not None or self._ahead.has_started:
            return []
        after = top_tokens(self._logits[self.rows.index], TOP_DRAFTS)[1].tolist()
        return [(tokens, found[: len(tokens)]) for tokens, found in zip(self._inputs, after, strict=True)]

    def _draft_unread(self, exit_layer: int, num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """Start a chain of draft steps whose tokens are read only when they are verified."""
        self._plan = exit_layer, num_tokens
        if self._ahead.take(self._plan, self._slots):
            self._clock.begin(self._ahead.read_at)
        else:
            self.upload([[token] for token in self.last_tokens])
            self._run_drafts(self._plan)
        self._num_drafted = num_tokens
        self._clock.note_unread(exit_layer, num_tokens, *self._drafts_at)
        return [[UNREAD] * num_tokens for _ in self.rows.own], []

    def _run_drafts(self, plan: Plan) -> None:
        exit_layer, num_tokens = plan
        before = timestamp(self.buffers.device)
        for _ in range(num_tokens):
            self.run_step("draft", exit_layer)
        self._drafts_at = before, timestamp(self.buffers.device)

    def verify(self, drafts: list[Draft]) -> StaticPass:
        """Run one full-depth pass, padded to a width that has a step; see `Engine.verify`."""
        drafts = [Draft(draft.nodes[: WIDEST - 1]) if self.takes_trees else draft.chain() for draft in drafts]
        width = 1 + max(len(draft.nodes) for draft in drafts)
        self._inputs = [[last, *draft.tokens] for last, draft in zip(self.last_tokens, drafts, strict=True)]
        self._width, first = self.costs_of(len(drafts)).pass_width(width), 0
        depths = [self.eager.run.num_layers] * len(drafts)
        if self.exits is not None:
            self._logits = self.exits.run(self)
            depths, first = self.exits.exits, self.exits.current
        elif width == 1 and self._ahead.take(PLAIN, self._slots):
            self._clock.begin(self._ahead.read_at)
        else:
            # Draft tokens that the host has not read are among the inputs of the draft steps.
            if self.reads_drafts or not self._num_drafted:
                self._clock.begin()
                self.upload(self._inputs, parents=[draft.parents(WIDEST) for draft in drafts])
            self._logits = self.run_step("verify", self._width)
            if self._lazy_head is not None:
                self._lazy_head.rollback()
        self._num_drafted = 0
        ids = self.buffers.tensors.ids[:, first:]
        return StaticPass(width, depths, self.rows.index, self._logits, ids, drafts, self._read)

    def run_step(self, kind: str, size: Any) -> Any:
        """Run a step; return its logits."""
        step = self.steps.run(self.buffers, kind, size)
        self._layers += step.num_layers
        return step.logits

    def read_exits(self) -> list[int]:
        """Wait for a segment of a pass; return the exit layer of each row, the number of layers if it has none."""
        self.steps.reads += 1
        return self.rows.from_rows(self.buffers.exit_steps.read())

    def _read(self, chosen: Tensor | None, are_top: bool) -> list[list[int]]:
        """Wait for the results of this round for each sequence; the next one may start before, if it is like this one.

        `are_top`: whether the tokens that are accepted are the top-1 ones, as the device assumes then.
        """
        if chosen is not None:
            self.buffers.tensors.set_results(self.rows.index, chosen)
        plan, is_paused = self._plan, self.costs_of(len(self.rows.own)).drafting_paused
        starts = self._ahead.may_start(plan, self._width, self.rows, self._slots) and are_top
        starts = starts and (is_paused if plan == PLAIN else not is_paused and plan[0] == self.head_layer)
        results = self.steps.read(self.buffers, partial(self._run_ahead, plan) if starts else None)
        self._ahead.read_at = perf_counter()
        if starts:
            self._ahead.start(plan, self._slots, results[0])
        return self.rows.from_rows(results)

    def _run_ahead(self, plan: Plan) -> None:
        """Start the next round: its draft steps, or its pass without drafts."""
        self.steps.advance(self.buffers)
        if plan == PLAIN:
            self._logits = self.run_step("verify", 1)
        else:
            self._run_drafts(plan)

    def commit(self, accepted: list[Accepted]) -> None:
        """Keep the K/V of the accepted tokens of the last pass; see `Engine.commit`."""
        self.rows.commit(accepted, is_prefill=not self._width)
        if not self._width:
            return
        if self.exits is not None:
            self.exits.commit(self.last_tokens)
        self._slots.commit(self._width, self.rows.to_rows([one.kept for one in accepted]))
        if self._lazy_head is not None:
            self._keep_taps(self._lazy_head, accepted[0].kept)
        self._clock.end_round(self._width, len(accepted), is_full=self.exits is None)
        self._plan = PLAIN

    def _keep_taps(self, head: HeadRun, kept: list[int]) -> None:
        """Give the head what it reads of the tokens that the only row has kept, by index."""
        tokens, is_chain = [self._inputs[0][index] for index in kept], kept == list(range(len(kept)))
        tapped = self.buffers.tapped[:, : len(kept)].clone() if is_chain else self.buffers.tapped[:, kept]
        head.take_pass(torch.tensor([tokens], dtype=torch.int64), tapped, self._slots.mask)

    def select(self, rows: list[int]) -> None:
        """Keep only these sequences: move them to existing smaller buffers, or else ignore the other rows."""
        if self.exits is not None:
            self.exits.select(self, rows)
        self.rows.select(rows)
        smaller = None if self._ahead.has_started else self.steps.smaller(self.buffers, len(rows))
        if smaller is not None:
            self._move_to(smaller)
        else:
            self._slots.select_rows(self.rows.to_rows(self.rows.own))

    def finish(self, compact: bool) -> Any:
        """Copy the K/V back to the call's own cache, if the caller receives that cache; see `Engine.finish`."""
        eager = self.eager
        if eager.is_returned:
            if self.exits is not None:
                self.exits.catch_up(self)
            self._slots.compact()
            copy_back(self.buffers.cache, eager.slots.cache, self._slots.length)
            if eager.head is not None and not eager.head.is_lazy and self.rows.last_kept is not None:
                eager.head.continue_from(self.buffers.last_hidden_states, self.rows.last_kept)
        return eager.finish(compact)

    def upload(self, ids: list[list[int]], back: int = 0, parents: list[list[int]] | None = None) -> None:
        """Upload the inputs of the round, which begin `back` tokens before the next one, and the `parents` in trees."""
        self._ahead.drop(self.rows)
        if not back and not self._slots.make_room(WIDEST):  # continue in buffers with more slots
            self._move_to(self._grown())
        is_compacted = self._slots.num_compactions > self._compactions
        if self._slots.rejected is not None or is_compacted:
            start = 0 if is_compacted else self._masked
            self.buffers.tensors.write_mask(self._slots.mask, self._slots.rejected, start)
            self._compactions, self._masked = self._slots.num_compactions, self._slots.length
        highest, last_kept = self.rows.check_positions(), self.rows.last_kept
        last_kept = None if last_kept is None else self.rows.to_rows(last_kept)
        start, positions = self._slots.length - back, self.rows.positions(back)
        parents = None if parents is None else self.rows.to_rows(parents)
        self.buffers.tensors.write(start, positions, highest, self.rows.to_rows(ids), last_kept, parents)
        self.buffers.begin_round(after_passes=last_kept is not None)

    def _grown(self) -> StepBuffers:
        """Buffers with slots for the next part of the answer."""
        rows, kind, length = len(self.rows.own), self.buffers.kind, self._slots.length
        is_spare = not self.steps.grows and rows == self.buffers.rows
        filled = FilledCache(self.buffers.cache, length, is_spare)
        slots = self.steps.slots_for(filled, rows, length + self.rows.remaining, kind)
        return self.steps.buffers(filled, rows, slots, kind)

    def _move_to(self, buffers: StepBuffers) -> None:
        """Continue the unfinished sequences in other buffers."""
        slots, own, other = self._slots, self.rows.own, self.buffers
        self.rows.move(buffers.rows)
        slots.select_rows(self.rows.to_rows(own))
        buffers.take_over(other, slots.length, slots.mask, slots.rejected, own)
        slots.cache, self.buffers = buffers.cache, buffers
