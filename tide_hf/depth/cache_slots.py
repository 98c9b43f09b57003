"""Which slots of a batch's K/V are its tokens, where each row keeps as many of a pass's as it accepts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..kernels.ops import PLAIN, Ops
from ..kernels.reference import kv_compact
from .kv_cache import crop, cut_back


class CacheSlots:
    """The slots of a batch's cache when every row accepts as many tokens as it likes.

    A pass writes one slot per row and token. What a row rejects is cut off where all rows reject it; elsewhere it stays
    as a hole, which the attention mask hides and which positions step over. When holes are more than
    `compaction_threshold` of the cache, or where masks cannot hide them (a sliding window counts slots), the rows are
    moved together, so that each ends at the last slot.

    Args:
        cache: The cache after the prompt's pass.
        length: Slots that are filled.
        attention_mask: (rows, length) of the prompt; `None` where nothing is padded.
        compaction_threshold: Share of holes that is put up with.
        device: Where the tokens are; the layers of an offloaded cache come and go.
        ops: What moves the rows together.
        has_windows: Whether some layers attend to so many slots, hidden or not.

    Attributes:
        length: Slots that are filled, but for those of a pass that is not committed.
    """

    def __init__(
        self,
        cache: Cache,
        length: int,
        attention_mask: Tensor | None,
        compaction_threshold: float,
        device: torch.device,
        ops: Ops = PLAIN,
        has_windows: bool = False,
    ) -> None:
        self.cache = cache
        self.length = length
        self.has_windows = has_windows
        self.device = device
        self.mask = attention_mask
        self.holes: Tensor | None = None
        self.compaction_threshold = compaction_threshold
        self.ops = ops
        self.num_compactions = 0

    def mask_for(self, width: int) -> Tensor | None:
        """(rows, cached + width) attention mask of a pass over `width` tokens; `None` where all is visible."""
        return None if self.mask is None else _append(self.mask, width, 1)

    def commit(self, width: int, accepted: list[int]) -> None:
        """Keep the first `accepted[row]` of the `width` slots that the last pass wrote."""
        longest = max(accepted)
        if min(accepted) == longest and self.holes is None:
            self.mask = self.mask_for(longest)
            self.length += longest
            # Also with nothing to remove: it lets sliding-window layers drop what has left the window.
            self._crop(width - longest)
            return
        kept = torch.arange(width, device=self.device) < torch.tensor(accepted, device=self.device)[:, None]
        mask, holes = self._with_holes(kept)
        if self.has_windows:
            self._compact(mask, holes)
            return
        self._crop(width - longest)
        self.length += longest
        self.mask, self.holes = mask[:, : self.length], holes[:, : self.length]
        if float(self.holes.float().mean()) > self.compaction_threshold:
            self._compact(self.mask, self.holes)

    def settle(self) -> None:
        """Remove all holes."""
        if self.mask is not None and self.holes is not None:
            self._compact(self.mask, self.holes)

    def break_off(self) -> None:
        """Leave a cache to go on with, whatever an interrupted pass has stored in some of the layers.

        Each row keeps as many tokens as the shortest has, or none where a window has dropped what longer ones need.
        """
        cut_back(self.cache, self.length)
        if self.holes is None:
            return
        has_all = all(layer.keys.shape[-2] == self.length for layer in self.cache.layers)
        shortest = int((~self.holes).sum(dim=1).min()) if has_all else 0
        order = torch.argsort(self.holes.to(torch.uint8), dim=1, stable=True)[:, :shortest]  # holes go last
        self._move(order, self.length)

    def select(self, rows: list[int]) -> Tensor:
        """Keep only these rows; return their positions as a tensor, on the CPU, which indexes layers anywhere."""
        index = torch.tensor(rows)
        self.cache.batch_select_indices(index)
        if self.mask is not None:
            self.mask = self.mask[index.to(self.mask.device)]
        if self.holes is not None:
            self.holes = self.holes[index.to(self.holes.device)]
        return index

    def _crop(self, num_tokens: int) -> None:
        for layer in self.cache.layers:
            crop(layer, num_tokens)

    def _move(self, order: Tensor, total: int) -> None:
        for layer in self.cache.layers:
            _gather_slots(layer, order, total, self.ops)

    def _with_holes(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Mask and holes, (rows, cached) each, after a pass that wrote as many slots as `kept` (rows, width) has."""
        shape = (kept.shape[0], self.length)
        mask = torch.ones(shape, dtype=torch.long, device=kept.device) if self.mask is None else self.mask
        holes = torch.zeros(shape, dtype=torch.bool, device=kept.device) if self.holes is None else self.holes
        return torch.cat([mask, kept.to(mask)], dim=-1), torch.cat([holes, ~kept], dim=-1)

    def _compact(self, mask: Tensor, holes: Tensor) -> None:
        """Move the rows together by one gather (or kernel) per layer, each ending at the last slot."""
        self.num_compactions += 1
        total, width = holes.shape[1], int((~holes).sum(dim=1).max())
        # A stable sort puts holes first and leaves the tokens in order; what is left of a longer row's holes goes.
        order = torch.argsort((~holes).to(torch.uint8), dim=1, stable=True)[:, -width:]
        self.mask, remaining = mask.gather(1, order), holes.gather(1, order)
        self.holes = remaining if bool(remaining.any()) else None
        self.length = width
        self._move(order.masked_fill(remaining, -1) if self.ops.kernels is not None else order, total)


def _gather_slots(layer: Any, order: Tensor, total: int, ops: Ops) -> None:
    """Replace a layer's slots by those that `order` (rows, kept) names, counted from the sequence's first.

    What stands in a slot of which the order is negative does not matter: the mask hides it.
    A sliding-window layer holds only the last slots, and needs no more of them than the window.
    """
    width = order.shape[1]
    stored = layer.keys.shape[-2]
    if layer.is_sliding:
        order = order[:, -min(width, layer.sliding_window - 1) :] - (total - stored)
        layer.cumulative_length = width
    compact = ops.kv_compact if ops.run_on(layer.keys, layer.values) else kv_compact
    layer.keys, layer.values = compact(layer.keys, layer.values, order.to(layer.keys.device))


def _append(mask: Tensor, width: int, value: int) -> Tensor:
    return torch.cat([mask, mask.new_full((mask.shape[0], width), value)], dim=-1)
