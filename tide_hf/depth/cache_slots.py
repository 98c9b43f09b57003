"""The KV cache slots of a batch in which each row accepts its own number of draft tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..kernels.ops import PLAIN, Ops
from ..kernels.reference import kv_compact
from .kv_cache import crop, cut_back


class CacheSlots:
    """The slots of a batch's cache, where each row accepts its own number of draft tokens.

    A pass writes one slot per row and token. Slots that all rows reject are cropped; others stay as holes, which the
    attention mask hides and positions skip. The cache is compacted, so that each row ends at the last slot, when the
    share of holes exceeds `compaction_threshold`, or when masks cannot hide them (a sliding window counts slots).

    Args:
        cache: The cache after prefill.
        length: Number of filled slots.
        attention_mask: (rows, length) of the prompt; `None` without padding.
        compaction_threshold: Largest share of holes before the cache is compacted.
        device: Device of the tokens, since the layers of an offloaded cache move between devices.
        ops: Kernels for the compaction, if any.
        has_windows: Whether some layers have a sliding window.

    Attributes:
        length: Number of filled slots, those of a pass that is not committed left out.
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
        """(rows, cached + width) attention mask of a pass over `width` tokens; `None` if nothing is masked."""
        return None if self.mask is None else _append(self.mask, width, 1)

    def commit(self, width: int, accepted: list[int]) -> None:
        """Keep the first `accepted[row]` of the `width` slots that the last pass wrote."""
        longest = max(accepted)
        if min(accepted) == longest and self.holes is None:
            self.mask = self.mask_for(longest)
            self.length += longest
            # Even with nothing to remove, since cropping lets sliding-window layers drop what has left the window.
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
        """Compact the cache, so that no holes are left."""
        if self.mask is not None and self.holes is not None:
            self._compact(self.mask, self.holes)

    def break_off(self) -> None:
        """Make the cache consistent after an interrupted pass, which may have written to some layers only.

        Each row keeps as many tokens as the shortest has, or none if a sliding window has dropped slots.
        """
        cut_back(self.cache, self.length)
        if self.holes is None:
            return
        has_all = all(layer.keys.shape[-2] == self.length for layer in self.cache.layers)
        shortest = int((~self.holes).sum(dim=1).min()) if has_all else 0
        order = torch.argsort(self.holes.to(torch.uint8), dim=1, stable=True)[:, :shortest]  # holes go last
        self._move(order, self.length)

    def select(self, rows: list[int]) -> Tensor:
        """Keep only these rows; return them as an index tensor on the CPU, which indexes layers on any device."""
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
        """Mask and holes, (rows, cached + width) each, after a pass of which each row keeps `kept` (rows, width)."""
        shape = (kept.shape[0], self.length)
        mask = torch.ones(shape, dtype=torch.long, device=kept.device) if self.mask is None else self.mask
        holes = torch.zeros(shape, dtype=torch.bool, device=kept.device) if self.holes is None else self.holes
        return torch.cat([mask, kept.to(mask)], dim=-1), torch.cat([holes, ~kept], dim=-1)

    def _compact(self, mask: Tensor, holes: Tensor) -> None:
        """Move each row's tokens to the last slots, by one gather (or kernel) per layer."""
        self.num_compactions += 1
        total, width = holes.shape[1], int((~holes).sum(dim=1).max())
        # A stable sort puts holes first and keeps the tokens in order; the longest row sets how many slots remain.
        order = torch.argsort((~holes).to(torch.uint8), dim=1, stable=True)[:, -width:]
        self.mask, remaining = mask.gather(1, order), holes.gather(1, order)
        self.holes = remaining if bool(remaining.any()) else None
        self.length = width
        self._move(order.masked_fill(remaining, -1) if self.ops.kernels is not None else order, total)


def _gather_slots(layer: Any, order: Tensor, total: int, ops: Ops) -> None:
    """Gather the slots `order` (rows, kept) of a layer, counted from the first of the sequence.

    A negative index marks a slot that the mask hides, whose contents do not matter. A sliding-window layer holds only
    the last slots, and keeps no more than the window.
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
