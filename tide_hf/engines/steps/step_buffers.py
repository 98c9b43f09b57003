"""The tensors of steps, which stay where they are, and what a draft step and a verify pass do with them.

A step runs the model's own forward on fixed K/V (`fixed_cache`). What changes from round to round (tokens, slots,
positions) is in tensors on the device, written by one copy. A draft step puts its token where the next step looks for
it, so a chain of drafts and the pass that verifies them need the host only to start them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...base_model.structure import CACHE, DecoderStructure, last_position
from ...base_model.unembed import DraftUnembed, Unembed, greedy_tokens
from ...depth.block_drafting import BlockRun
from ...depth.gates import FixedDepthRun, LayerRun, active
from ...routers.routers import TIDERouters
from .fixed_cache import fill, first_rows, fixed_cache, take_rows

WIDTHS = (1, 2, 4, 8, 16)  # of verify passes; others are filled up
WIDEST = WIDTHS[-1]
BUCKET = 256  # slots; buffers, and so graphs, serve all calls up to the next multiple
FIRST_SLOTS = 1024  # of buffers that grow, where a call may need so many
SPARE_SLOTS = 256  # for holes, with several rows


@dataclass(frozen=True)
class Parts:
    """What of an attached model the steps run.

    Attributes:
        model: The model.
        structure: Its structure.
        unembed: Its unembedding.
        draft_unembed: What the heads draft with.
        routers: Routers and exit heads, if any.
        execute_layer: As of a `LayerRun`.
    """

    model: Any
    structure: DecoderStructure
    unembed: Unembed
    draft_unembed: DraftUnembed
    routers: TIDERouters | None
    execute_layer: Any = None


class StepBuffers:
    """The tensors of all steps of one number of rows and slots.

    Args:
        parts: What the steps run.
        like: A filled cache of the model's, for shapes and dtypes.
        rows: Sequences.
        capacity: Slots of each.
        position_shape: In front of rows, where the model is told positions of several kinds; `None`: it is told none.
        has_block: Whether the block drafts, whose K/V are in the last layer of the cache.
        has_scores: Whether each draft token's exit score is wanted.
        shared: K/V of as many slots and more rows, of which these are to be a part.
    """

    def __init__(
        self,
        parts: Parts,
        like: Cache,
        rows: int,
        capacity: int,
        position_shape: tuple[int, ...] | None,
        has_block: bool,
        has_scores: bool = False,
        shared: Cache | None = None,
    ) -> None:
        self.parts, self.rows, self.capacity, self.position_shape = parts, rows, capacity, position_shape
        self.last_position = last_position(parts.model.config.get_text_config())
        first: Any = like.layers[0]
        self.device = device = first.keys.device
        self.cache = fixed_cache(like, rows, capacity) if shared is None else first_rows(shared, rows)
        hidden, dtype = parts.structure.hidden_size, first.keys.dtype
        kinds = position_shape or ()
        sizes = (1, 1, math.prod(kinds) * rows, rows, rows * WIDEST)  # of what the host says in each round
        with torch.inference_mode(False):
            self._said = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
            self._heard = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
            self.mask = torch.ones((rows, capacity), dtype=torch.int64, device=device)
            self._mask_said = torch.ones((rows, capacity), dtype=torch.int64, pin_memory=device.type == "cuda")
            self._results = torch.zeros((rows, 2 * WIDEST), dtype=torch.int64, device=device)
            self.scores = torch.zeros(rows, device=device) if has_scores else None
            if has_block:
                self.finals = torch.zeros((rows, WIDEST, hidden), dtype=dtype, device=device)
                self.deep = torch.zeros((rows, 1, hidden), dtype=dtype, device=device)
                self.deep_drafted = torch.zeros_like(self.deep)
        self.start, self.fed, positions, self.kept, ids = self._heard.split(sizes)
        self.positions = positions.view(*kinds, rows)
        self.ids = ids.view(rows, WIDEST)
        self.block: BlockRun | None = None
        if has_block and parts.routers is not None and parts.routers.block is not None:
            block_layer = parts.routers.config.block_layer
            self.block = BlockRun(parts.structure, self.cache, parts.unembed, parts.routers.block, block_layer)

    def load(self, source: Cache, length: int, mask: Tensor | None, deep: Tensor | None) -> None:
        """Take over a cache of `length` tokens, a (rows, length) mask, and the block's last deep state.

        Cache and state may be of fewer rows, the first ones.
        """
        fill(self.cache, source, length)
        self.write_mask(mask)
        if deep is not None and self.block is not None:
            self.deep[: len(deep)] = deep

    def take_over(self, other: StepBuffers, length: int, mask: Tensor | None, rows: list[int]) -> None:
        """Go on with some rows of other buffers, which may share memory with these.

        Args:
            other: The buffers.
            length: Slots of theirs that are filled.
            mask: (rows of these buffers, length).
            rows: Of `other`, ascending, for the first rows of these.
        """
        for own, layer in zip(self.cache.layers, other.cache.layers, strict=True):
            take_rows(own, layer, length, rows)
        self.write_mask(mask)
        if self.block is not None:
            self.finals[: len(rows)] = other.finals[rows]

    def write_mask(self, mask: Tensor | None) -> None:
        """Hide what a (rows, length) mask on the CPU hides; `None` hides nothing."""
        self._mask_said.fill_(1)
        if mask is not None:
            self._mask_said[:, : mask.shape[1]] = mask
        self.mask.copy_(self._mask_said, non_blocking=True)

    def write(self, start: int, positions: list[list[int]], ids: list[list[int]], kept: list[int] | None) -> None:
        """Say what a round starts from, by one copy that nobody waits for.

        Args:
            start: The first slot to write to.
            positions: Of each row's first token, one of each kind.
            ids: Each row's last token, and draft tokens behind it.
            kept: How many tokens of the pass before each row kept; `None` before the first.
        """
        padded = [token for row in ids for token in row + row[-1:] * (WIDEST - len(row))]
        behind = [max(0, count - 1) for count in kept] if kept is not None else [0] * self.rows
        by_kind = [position for kind in zip(*positions, strict=True) for position in kind]
        self._said.copy_(torch.tensor([start, 0, *by_kind, *behind, *padded]))
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
        self._results[:, :width] = greedy_tokens(logits)
        self._results[:, WIDEST:] = self.ids
        if self.block is not None:
            final: Any = self.block.final
            self.finals[:, :width].copy_(final)
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
            top = self._block_top(state)
        else:
            routers: Any = self.parts.routers
            point, state = routers[exit_layer], call.state[:, -1]
            top = self.parts.draft_unembed(point.head(state))
            if self.scores is not None:
                self.scores.copy_(self.parts.unembed.route(point.router, state))
        self.fed.add_(1)
        self.ids.index_copy_(1, self.fed, top[:, None])
        return run.layers_executed, None

    def _block_top(self, state: Tensor) -> Tensor:
        if self.scores is None:
            return self.parts.draft_unembed(state)
        top, log_probabilities = self.parts.draft_unembed.top1(state)
        self.scores.copy_(self.block.point.score(log_probabilities))  # type: ignore[union-attr]
        return top

    def feed(self, tokens: list[int]) -> None:
        """Let the next draft step go on behind these tokens, one a row, instead of those drafted last."""
        self.ids[:, int(self.fed)] = torch.tensor(tokens, device=self.device)

    def read_draft(self) -> tuple[list[int], list[float]]:
        """Wait for the last draft step; return each row's token and its exit score."""
        return self.ids[:, int(self.fed)].tolist(), self.scores.tolist()  # type: ignore[union-attr]

    def _forward(self, ids: Tensor, start: Tensor, fed: Tensor | int = 0) -> Any:
        width = ids.shape[1]
        self.cache.layers[0].cursor.move_to(start, width)
        inputs = {"input_ids": ids, "attention_mask": self.mask, CACHE: self.cache, "use_cache": True}
        if self.position_shape is not None:
            steps = torch.arange(width, device=self.device) + fed
            positions = self.positions[..., None] + steps
            # What fills a pass up may stand behind the last position that there is.
            inputs["position_ids"] = (
                positions if self.last_position is None else positions.clamp(max=self.last_position - 1)
            )
        return self.parts.model(**inputs, return_dict=True)


def slots_for_now(filled: int, most: int) -> int:
    """Slots of buffers that grow: few sizes, so few graphs, and at most twice as many as are filled, or `FIRST_SLOTS`.

    Args:
        filled: Slots that are filled.
        most: Slots that the call may need.
    """
    slots = FIRST_SLOTS // 2
    while slots < most and (slots < FIRST_SLOTS or slots - WIDEST <= filled):
        slots *= 2
    return slots - WIDEST


def capacity_for(rows: int, slots: int) -> int:
    """Slots of the buffers for a call that may need `slots`, and room for a pass."""
    needed = slots + WIDEST + (SPARE_SLOTS if rows > 1 else 0)
    return -(-needed // BUCKET) * BUCKET
