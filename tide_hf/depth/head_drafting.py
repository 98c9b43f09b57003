"""The draft head in one self-speculative call: the tapped hidden states that it reads, and its K/V."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..base_model.structure import DecoderStructure
from ..routers.draft_head import Attention, DraftHead, attend
from ..routers.routers import TIDERouters
from .gates import ExecuteLayer, on_device
from .kv_cache import GrowingLayer, crop
from .masks import current_tree
from .taps import TapRun

STATE_ATTRIBUTE = "_tide_head"  # of a returned cache, holding a `HeadState`
MAX_PENDING_TOKENS = 64  # bounds the memory of tapped states whose K/V are not filled yet


class QuickHead(Protocol):
    """Runs a draft head for a single row without padding."""

    def __call__(self, embeddings: Tensor, fused: Tensor, kv: GrowingLayer) -> Tensor:
        """Store the K/V of tokens; return the head's output for the last one. See [`DraftHead.forward`]."""

    def logits(self, normalised: Tensor) -> Tensor:
        """Logits (..., draft vocabulary) of the normalised output (..., D)."""


@dataclass
class HeadState:
    """State of the head on a returned cache, with which a call that continues from it can draft."""

    identity: str  # of the head
    kv: DynamicLayer  # its K/V
    prev_hidden_state: Tensor | None  # as in `HeadRun`


def head_state_of(cache: Any, identity: str, dtype: torch.dtype) -> HeadState | None:
    """Detach the state of a head in `dtype` from a cache: empty for an empty cache, `None` where it does not fit."""
    state = vars(cache).pop(STATE_ATTRIBUTE, None)
    length = cache.get_seq_length()
    if length == 0:
        return HeadState(identity, DynamicLayer(), None)
    if state is None or state.identity != identity or state.kv.keys.dtype != dtype:
        return None
    if len(state.kv.keys) != len(cache.layers[0].keys):
        return None
    surplus = state.kv.get_seq_length() - length
    if surplus < 0:  # tokens were added without the head
        return None
    if surplus > 0:  # the cache was cropped, so the state of its last token is unknown
        crop(state.kv, surplus)
        state.prev_hidden_state = None
    return state


@dataclass
class _Pass:
    """Tokens of a full-depth pass whose K/V of the head are not filled yet."""

    inputs: Tensor  # its tokens (rows, width), or their embeddings (rows, width, D)
    tapped: Tensor  # (rows, width, taps * D)


class HeadRun(TapRun):
    """Full-depth passes that also collect the tapped hidden states, from which the head's K/V are filled.

    In a batch, the K/V are one more layer of the call's cache, filled after each pass, so that cropping, compaction and
    row selection apply to them as to the base model's layers. For a single row they are filled when the head drafts: a
    head that never drafts costs nothing.

    Args:
        structure: Of the base model.
        cache: The call's cache.
        head: The draft head.
        embed: The base model's input embedding.
        state: The head's state after the cached tokens.
        is_lazy: Whether the call has a single row.
        attention: Of the head's drafts.
        fuse: Gives what runs the head for a single row, if that is not the head itself.
        execute_layer: As in `LayerRun`.
    """

    exit_layer = 0  # no layer of the base model runs before the head drafts

    def __init__(
        self,
        structure: DecoderStructure,
        cache: Any,
        head: DraftHead,
        embed: Callable[[Tensor], Tensor],
        state: HeadState,
        *,
        is_lazy: bool,
        attention: Attention = attend,
        execute_layer: ExecuteLayer | None = None,
        fuse: Callable[[DraftHead], QuickHead | None] | None = None,
    ) -> None:
        super().__init__(structure, cache, tap_layers=head.config.tap_layers, execute_layer=execute_layer)
        self.head, self.embed, self.is_lazy, self.attention = head, embed, is_lazy, attention
        self.kv = GrowingLayer.like(state.kv) if is_lazy else state.kv
        self._fuse = fuse if is_lazy else None
        self._quick: QuickHead | None = None  # from the first draft on
        self.prev_hidden_state = state.prev_hidden_state  # (rows, 1, D) fused state of the last cached token
        self.mask: Tensor | None = None  # (rows, slots) of the current pass's tokens and those before; `None` for ones
        self._inputs: Tensor | None = None  # as in `_Pass`, of the current pass
        self._pending: list[_Pass] = []
        self.last_hidden_states: Tensor | None = None  # (rows, width, D) fused states of the last pass
        self.draft_hidden_state: Tensor | None = None  # the head's own output, after a drafted token
        self._num_steps = 0  # draft steps since the last pass
        if not is_lazy and len(cache.layers) == structure.num_layers:
            cache.layers.append(self.kv)

    def starts(self, kwargs: dict[str, Any]) -> None:
        """Take the tokens, or their embeddings, and the mask from the model's arguments at the start of a pass."""
        super().starts(kwargs)
        embeddings, self.mask = kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
        self._inputs = kwargs["input_ids"] if embeddings is None else embeddings

    @contextmanager
    def prefilling(self, cache: Any) -> Iterator[None]:
        """As [`LayerRun.prefilling`]; these rows have no previous token."""
        own, self.kv, self.prev_hidden_state = self.kv, cache.layers[self.num_layers], None
        try:
            with super().prefilling(cache):
                yield
        finally:
            self.kv = own

    @property
    def num_pending(self) -> int:
        """Passes whose K/V the head has yet to fill."""
        return len(self._pending)

    def commit(self, kept: list[list[int]]) -> None:
        """After a verify pass, continue from those of its tokens, by index, that each row has kept."""
        self.draft_hidden_state = None
        if self.is_lazy:
            last = self._pending[-1]
            last.inputs, last.tapped = (_only(one, kept[0]) for one in (last.inputs, last.tapped))
            self._bound_pending()
        elif self.last_hidden_states is not None:
            self.continue_from(self.last_hidden_states, [slots[-1] if slots else 0 for slots in kept])

    def continue_from(self, last_hidden_states: Tensor, last: list[int]) -> None:
        """Continue from each row's token, by index, of a pass with these fused states, (rows, width, D)."""
        rows = torch.arange(len(last), device=last_hidden_states.device)
        index = torch.tensor(last, device=last_hidden_states.device)
        self.prev_hidden_state = last_hidden_states[rows, index][:, None]

    def select(self, index: Tensor) -> None:
        """Drop all rows but these."""
        if self.prev_hidden_state is not None:
            self.prev_hidden_state = self.prev_hidden_state[index.to(self.prev_hidden_state.device)]

    def draft(self, tokens: Tensor, mask: Tensor | None, num_tokens: int = 1) -> tuple[Tensor, Tensor]:
        """Draft the likeliest next tokens of each row.

        Args:
            tokens: (rows, 1), each row's last token, or the one drafted before.
            mask: (rows, slots) of the cached tokens and these; `None` for ones.
            num_tokens: How many.

        Returns:
            The tokens, best first, and the probabilities that the base model agrees, (rows, num_tokens) each.
        """
        embeddings, fused = self._read(tokens)
        self._num_steps += 1
        if self._fuse is not None:
            self._quick, self._fuse = self._fuse(self.head), None
        if self._quick is not None and mask is None:
            output, unembed = self._quick(embeddings, fused, self.kv), self._quick.logits
        else:
            width, device = embeddings.shape[1], embeddings.device
            slots = self._next_slots(width)
            attended = attended_slots(mask, slots, self.kv.get_seq_length() + width - 1)
            positions, attended = positions_of(mask, slots).to(device), attended.to(device)
            output, unembed = self.head(embeddings, fused, positions, self.kv, attended, self.attention), None
        top, scores, self.draft_hidden_state = self.head.draft(output, num_tokens, unembed)
        return top, scores

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads of these tokens, and of those that are pending: embeddings and fused states."""
        embeddings, before, previous = self._embed(tokens), None, None
        if self._pending:  # the K/V of earlier tokens are filled in the same step
            before, previous = self._take_pending()
        fused = self.draft_hidden_state if self.draft_hidden_state is not None else self.prev_hidden_state
        fused = torch.zeros_like(embeddings) if fused is None else fused.to(embeddings)
        if before is not None and previous is not None:
            embeddings, fused = torch.cat([before, embeddings], dim=1), torch.cat([previous, fused], dim=1)
        return embeddings, fused

    def rollback(self) -> None:
        """Remove the K/V of the draft tokens."""
        if self._num_steps:
            crop(self.kv, self._num_steps)
        self.draft_hidden_state, self._num_steps = None, 0

    def remember(self) -> None:
        """Store the head's state on the returned cache, for a call that continues from it."""
        self._fill()
        kv = self.kv if self.is_lazy else self.cache.layers[self.num_layers]
        setattr(self.cache, STATE_ATTRIBUTE, HeadState(self.head.identity, kv, self.prev_hidden_state))

    def finish(self) -> None:
        """Remove the head's layer from the cache."""
        del self.cache.layers[self.num_layers :]

    def end_pass(self) -> None:
        """Take in the states of a pass."""
        super().end_pass()
        inputs, self._inputs, tapped, self.tapped = self._inputs, None, self.tapped, None
        assert inputs is not None  # set by `starts`
        assert tapped is not None  # set by the pass
        self._pending.append(_Pass(inputs, tapped))
        if not self.is_lazy:
            self._fill()

    def take_pass(self, tokens: Tensor, tapped: Tensor, mask: Tensor | None) -> None:
        """Take in what is kept of a pass that another run has collected states of.

        `tokens` (1, width), `tapped` (1, width, taps * D), `mask` (1, slots) of these tokens and those before.
        """
        self.mask = mask
        self._pending.append(_Pass(tokens, tapped))
        self._bound_pending()

    def _bound_pending(self) -> None:
        if sum(one.tapped.shape[1] for one in self._pending) > MAX_PENDING_TOKENS:
            self._fill()

    def _fill(self) -> None:
        """Fill the K/V of pending tokens."""
        if not self._pending:
            return
        embeddings, previous = self._take_pending()
        positions = positions_of(self.mask, self._next_slots(embeddings.shape[1])).to(embeddings.device)
        if (tree := current_tree()) is not None:
            positions = positions[:, :1] + tree.depths.to(embeddings.device)
        self.head.store(embeddings, previous, positions, self.kv)

    def _take_pending(self) -> tuple[Tensor, Tensor]:
        """Embeddings of the pending tokens, and the fused states of the tokens before them, (rows, width, D) each."""
        inputs = [one.inputs for one in self._pending]
        if any(one.is_floating_point() for one in inputs):
            embeddings = torch.cat([one if one.is_floating_point() else self._embed(one) for one in inputs], dim=1)
        else:
            embeddings = self._embed(torch.cat(inputs, dim=1))
        tapped = torch.cat([one.tapped for one in self._pending], dim=1)
        self._pending.clear()
        # Another model that shares the routers may have cast them.
        fused = on_device(self.head, tapped).fuse(tapped.to(self.head.norm.weight.dtype))
        before = self.prev_hidden_state if self.prev_hidden_state is not None else torch.zeros_like(fused[:, :1])
        previous = torch.cat([before.to(fused), fused[:, :-1]], dim=1)
        if (tree := current_tree()) is not None:
            after = (tree.parents + 1)[..., None].to(fused.device).expand(-1, -1, fused.shape[-1])
            previous = torch.cat([before.to(fused), fused], dim=1).gather(1, after)
        self.last_hidden_states, self.prev_hidden_state = fused, fused[:, -1:]
        return embeddings.to(fused.device, fused.dtype), previous

    def _embed(self, tokens: Tensor) -> Tensor:
        """(rows, width, D) embeddings of tokens, by the head's own table or the base model's."""
        own, weight = self.head.embed_tokens, self.head.norm.weight
        table: Any = self.embed if own is None else own
        # Placeholders of images, and tokens that were added to the vocabulary since, may lie outside the table.
        known = tokens.clamp(max=table.num_embeddings - 1) if isinstance(table, nn.Embedding) else tokens
        return table(known).to(weight.device, weight.dtype)

    def _next_slots(self, width: int) -> Tensor:
        """(width,) slots of the next tokens in the head's K/V."""
        if isinstance(self.kv, DynamicLayer):
            return torch.arange(width, device=self.head.norm.weight.device) + self.kv.get_seq_length()
        return self.kv.position.slots  # of a static cache


def _only(states: Tensor, tokens: list[int]) -> Tensor:
    """The states (rows, width, D) of these tokens, by index."""
    return states[:, : len(tokens)] if tokens == list(range(len(tokens))) else states[:, tokens]


def positions_of(mask: Tensor | None, slots: Tensor) -> Tensor:
    """(rows or 1, width) positions of the tokens in `slots` (width,): how many tokens are before each."""
    if mask is None:
        return slots[None]
    return (mask.cumsum(dim=1)[:, slots.to(mask.device)] - 1).clamp(min=0)


def attended_slots(mask: Tensor | None, slots: Tensor, length: int) -> Tensor:
    """(rows or 1, slots) mask of the tokens that the token in the last of `slots` attends to, `length` and itself.

    It leaves out each row's first token, which has no state of a token before.
    """
    if mask is None:
        return torch.arange(length + 1, device=slots.device)[None] > 0
    all_slots = torch.arange(mask.shape[1], device=mask.device)
    return mask.bool() & (mask.cumsum(dim=1) > 1) & (all_slots <= slots[-1].to(mask.device))


def head_run(
    structure: DecoderStructure, cache: Any, routers: TIDERouters | None, embed: Any, **kwargs: Any
) -> HeadRun | None:
    """Make the run of a call in which the draft head may draft; `None` without one, or its K/V of the cached tokens."""
    head = routers.draft_head if routers is not None else None
    if head is None or type(cache) is not DynamicCache:
        return None
    if cache.offloading or len(cache.layers) != structure.num_layers:
        return None
    state = head_state_of(cache, head.identity, head.norm.weight.dtype)
    if state is None:
        return None
    return HeadRun(structure, cache, head, embed, state, **kwargs)
