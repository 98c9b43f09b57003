"""The tensors that steps read and write, at fixed addresses, and the model's forward over them.

What changes from round to round (tokens, slots, positions) is uploaded by one copy, and the results are read by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...base_model.inputs import without_router_loss
from ...base_model.structure import CACHE, DecoderStructure, bounds_positions
from ...base_model.unembed import DraftUnembed, Unembed
from ...depth.masks import PassTree, current_tree, skipping_rejected
from ...routers.routers import TIDERouters
from ...weights.reading import WeightReading
from ..gqa_attention import filled_up_to

WIDTHS = (1, 2, 4, 8, 16)  # of verify passes; passes of other widths are padded to the next larger width
WIDEST = WIDTHS[-1]
CHAIN = [index - 1 for index in range(WIDEST)]  # the parents of a chain's tokens


@dataclass(frozen=True)
class ModelParts:
    """The parts of an attached model that steps run."""

    model: Any
    structure: DecoderStructure
    unembed: Unembed
    draft_unembed: DraftUnembed
    routers: TIDERouters | None
    weights: WeightReading
    execute_layer: Any = None  # see `LayerRun`

    @property
    def head_size(self) -> int:
        """Width of the hidden states that the draft head reads of the token before."""
        head = self.routers.draft_head if self.routers is not None else None
        return self.structure.hidden_size if head is None else head.config.hidden_size

    @property
    def num_drafts(self) -> int:
        """The number of tokens that the draft head chooses from."""
        head = self.routers.draft_head if self.routers is not None else None
        return 1 if head is None else head.config.draft_vocab_size


@dataclass(frozen=True)
class BufferKind:
    """What step buffers are, besides their numbers of rows and slots.

    Attributes:
        position_shape: Dimensions of the model's positions before (rows, width): one for mRoPE, `()` for plain
            positions; `None` if the model takes no positions.
        has_head: Whether steps run the draft head; its K/V are then the last layer of the cache.
        tap_layers: Where a head drafts apart from steps, the numbers of layers after which it reads states.
        has_scores: Whether the exit score of each draft token is computed.
        exit_layers: Those at which tokens may exit in `early_exit`; none in other modes.
        is_causal: Whether attention is ours, and masks hide no more than unfilled slots and later tokens: of one row,
            without padding.
        skips_rejected: Whether windows skip rejected tokens, which the rows of a batch leave in the cache.
        takes_trees: Whether passes over several tokens read trees.
    """

    position_shape: tuple[int, ...] | None = None
    has_head: bool = False
    tap_layers: tuple[int, ...] = ()
    has_scores: bool = False
    exit_layers: tuple[int, ...] = ()
    is_causal: bool = False
    skips_rejected: bool = False
    takes_trees: bool = False


class StepTensors:
    """The inputs and results of steps, and the model's forward over them.

    Attributes:
        start: (1,) the slot of each row's first token.
        num_drafted: (1,) draft steps since the last upload.
        last_accepted: (rows,) index of the last token that each row accepted in the last pass.
        ids: (rows, `WIDEST`) each row's last token, its draft, and padding.
        mask: (rows, capacity) of the slots that a pass attends to.
        rejected slots: (rows, capacity) of rejected tokens, for windows to skip; `None` where no window counts slots.
    """

    def __init__(self, parts: ModelParts, cache: Cache, rows: int, kind: BufferKind) -> None:
        first: Any = cache.layers[0]
        self.parts, self.cache, self.device = parts, cache, first.keys.device
        self._bounds_positions = bounds_positions(parts.model.config.get_text_config())
        self._takes_positions = kind.position_shape is not None
        leading, device, self._is_pinned = kind.position_shape or (), self.device, self.device.type == "cuda"
        # Start, draft steps, highest position, positions, last accepted, ids; for trees parents, depths, ancestors.
        num_ids, self._takes_trees = rows * WIDEST, kind.takes_trees
        sizes = (1, 1, 1, math.prod(leading) * rows, rows, num_ids, *([num_ids] * 3 if kind.takes_trees else []))
        with torch.inference_mode(False):
            self.device_inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
            self.mask = torch.ones((rows, first.keys.shape[2]), dtype=torch.int64, device=device)
            self.rejected = torch.zeros_like(self.mask) if kind.skips_rejected else None
            self._results = torch.zeros((rows, 2 * WIDEST), dtype=torch.int64, device=device)
            host: Any = {"device": "cpu", "pin_memory": self._is_pinned}
            self._host_results = torch.zeros((rows, 2 * WIDEST), dtype=torch.int64, **host)
        inputs = self.device_inputs.split(sizes)
        self.start, self.num_drafted, self._highest_position, positions, self.last_accepted = inputs[:5]
        self._positions = positions.view(*leading, rows)
        self.ids, *self._tree = (one.view(rows, WIDEST) for one in inputs[5:])

    def write(
        self,
        start: int,
        positions: list[list[int]],
        highest_position: int,
        ids: list[list[int]],
        last_kept: list[int] | None,
        parents: list[list[int]] | None = None,
    ) -> None:
        """Upload the inputs of a round by one asynchronous copy; `start` is the slot of the first token.

        `positions` has that token's position in each row (several for mRoPE); `highest_position` is what those of
        padding are cut to, where higher ones do harm; `ids` has each row's last token and draft, whose parents
        are `parents`, or the tokens before them; `last_kept` the index in the previous pass of the last token that each
        row accepted, `None` before the first pass.
        """
        padded = [token for row in ids for token in row + row[-1:] * (WIDEST - len(row))]
        last = last_kept if last_kept is not None else [0] * len(self.ids)
        by_kind = [position for kind in zip(*positions, strict=True) for position in kind]
        tree = _tree_inputs(parents or [CHAIN] * len(self.ids)) if self._takes_trees else []
        # In pinned memory of its own, which PyTorch keeps until it is copied: an earlier upload may not have been yet.
        inputs = [start, 0, highest_position, *by_kind, *last, *padded, *tree]
        uploaded = torch.tensor(inputs, device="cpu", pin_memory=self._is_pinned)
        self.device_inputs.copy_(uploaded, non_blocking=True)

    def tree(self, width: int) -> PassTree | None:
        """The tree that a pass over `width` tokens reads; `None` where passes read chains."""
        if not self._takes_trees or width == 1:
            return None
        parents, depths, ancestors = (one[:, :width] for one in self._tree)
        attended = (ancestors[..., None] >> torch.arange(width, device=self.device)) & 1
        return PassTree(parents, depths, attended.bool())

    def write_mask(self, mask: Tensor | None, rejected: Tensor | None, start: int = 0) -> None:
        """Upload (rows, length) masks of attended and rejected slots, from slot `start` on; `None`: none."""
        for buffer, found, default in ((self.mask, mask, 1), (self.rejected, rejected, 0)):
            if buffer is None:
                continue
            if start == 0:
                buffer.fill_(default)
            if found is not None:
                buffer[:, start : found.shape[1]].copy_(found[:, start:], non_blocking=True)

    def write_draft(self, num_steps: int, tokens: list[int]) -> None:
        """Set the draft token of each row that `num_steps` draft steps led to, from which the next one continues."""
        self.ids[:, num_steps] = torch.tensor(tokens, device=self.device)

    def set_results(self, rows: slice | list[int], tokens: Tensor) -> None:
        """Set what the host reads of some rows: the tokens, (rows, width), chosen at the first positions."""
        self._results[rows, : tokens.shape[1]] = tokens

    def keep_inputs(self) -> None:
        """Let the host read the tokens of this pass with its results."""
        self._results[:, WIDEST:] = self.ids

    def read(self, before_waiting: Callable[[], None] | None) -> list[list[int]]:
        """Wait for the round; return each row's chosen tokens and, from index `WIDEST` on, its input tokens.

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
        """Accept the tokens of draft steps that are the top-1 ones; let the next pass go on after them."""
        is_drafted = torch.arange(1, WIDEST, device=self.device) <= self.num_drafted
        is_right = (self._results[:, : WIDEST - 1] == self.ids[:, 1:]) & is_drafted
        self.last_accepted.copy_(is_right.cumprod(dim=1).sum(dim=1))
        self.start.add_(self.last_accepted[:1] + 1)  # the same in all rows, if there are several
        self._positions.add_(self.last_accepted + 1)
        self.ids[:, :1] = self._results.gather(1, self.last_accepted[:, None])
        self.num_drafted.zero_()

    def forward(self, ids: Tensor, start: Tensor, offset: Tensor | int = 0) -> Any:
        """Run the model over (rows, width) tokens from slot `start` on, `offset` tokens after the first one."""
        width = ids.shape[1]
        position: Any = self.cache.layers[0]
        position.position.move_to(start, width)
        inputs = {"input_ids": ids, "attention_mask": self.mask, CACHE: self.cache, "use_cache": True}
        if self._takes_positions:
            tree = current_tree()
            steps = torch.arange(width, device=self.device) if tree is None else tree.depths
            positions = self._positions[..., None] + steps + offset
            if self._bounds_positions:
                positions = torch.minimum(positions, self._highest_position)
            inputs["position_ids"] = positions
        # Uncompiled layers know the filled slots by this, compiled ones by an argument. A CPU's read all slots.
        filled = filled_up_to(position.position.end) if self.device.type != "cpu" else nullcontext()
        with filled, skipping_rejected(self.rejected):
            return self.parts.model(**without_router_loss(self.parts.model, inputs), return_dict=True)


def _tree_inputs(parents: list[list[int]]) -> list[int]:
    """The parents, depths and ancestors of all tokens; ancestors, a token itself among them, as bits of a number."""
    depths, ancestors = [], []
    for row in parents:
        own_depths: list[int] = []
        own_ancestors: list[int] = []
        for index, parent in enumerate(row):
            own_depths.append(own_depths[parent] + 1 if parent >= 0 else 0)
            own_ancestors.append((own_ancestors[parent] if parent >= 0 else 0) | 1 << index)
        depths += own_depths
        ancestors += own_ancestors
    return [*(parent for row in parents for parent in row), *depths, *ancestors]
