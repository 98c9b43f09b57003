"""The block head in one self-speculative call: its K/V, and the previous token's hidden state that the head reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..base_model.structure import DecoderStructure
from ..base_model.unembed import Unembed
from ..routers.exit_points import BlockPoint
from ..routers.routers import TIDERouters
from .gates import LayerCall, LayerGate, LayerRun, on_device
from .head_drafting import STATE_ATTRIBUTE, HeadState, head_state_of
from .kv_cache import crop, fill_skipped

MAX_PENDING_PASSES = 64  # bounds the memory for hidden states of passes whose K/V are not filled yet


class BlockRun(LayerRun):
    """A run of full-depth passes that also writes the block head's K/V and holds the hidden states that the head reads.

    The block's K/V are one more layer of the call's cache, after the model's own, so that cropping, compaction and row
    selection apply to them as to the base model's layers. The block drafts after exit layer `block_layer`.
    """

    def __init__(
        self, structure: DecoderStructure, cache: Any, unembed: Unembed, point: BlockPoint, block_layer: int
    ) -> None:
        super().__init__(structure, cache)
        self.unembed, self.point, self.exit_layer = unembed, point, block_layer
        self.gate = LayerGate(point.head.layer, structure.num_layers, point.head.returns_tuple)
        self.prev_hidden_state: Tensor | None = None  # (rows, 1, D) after the final norm, of the last cached token
        self.draft_hidden_state: Tensor | None = None  # the block's estimate of the same state, for a drafted token
        self.last_hidden_states: Tensor | None = None  # (rows, width, D) after the final norm, of the last pass
        self._call: LayerCall | None = None

    @contextmanager
    def prefilling(self, cache: Any) -> Iterator[None]:
        """As [`LayerRun.prefilling`]; the rows start without a previous hidden state."""
        self.prev_hidden_state = None
        with super().prefilling(cache):
            yield

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the layer; after the last layer, call `observe`."""
        if gate.layer_idx == self.exit_layer:
            self._call = LayerCall(args, kwargs)
        output = self.execute(gate, args, kwargs)
        if gate.layer_idx == self.num_layers - 1 and self._call is not None:
            self.observe(self._call, gate.state_of(output))
            self._call = None
        return output

    @property
    def num_pending(self) -> int:
        """Number of passes for which the block's K/V are not filled yet."""
        return 0

    def observe(self, call: LayerCall, final: Tensor) -> None:
        """Store the block's K/V for the tokens of a full-depth pass.

        `call` is the call of the layer after the block's exit layer; `final`, (rows, width, D), are the hidden states
        after the last layer.
        """
        self.last_hidden_states = self._fill(call, final)

    def commit(self, accepted: list[int]) -> None:
        """After a verify pass, continue after the first `accepted[row]` tokens of each row."""
        if self.last_hidden_states is not None:
            self.continue_from(self.last_hidden_states, accepted)
            self.draft_hidden_state = None

    def continue_from(self, last_hidden_states: Tensor, accepted: list[int]) -> None:
        """Set the previous hidden state of each row to that of the last accepted token; states are (rows, width, D)."""
        rows = torch.arange(len(accepted), device=last_hidden_states.device)
        last = torch.tensor(accepted, device=last_hidden_states.device) - 1
        self.prev_hidden_state = last_hidden_states[rows, last.clamp(min=0)][:, None]

    def select(self, index: Tensor) -> None:
        """Drop all rows except those in `index`."""
        if self.prev_hidden_state is not None:
            self.prev_hidden_state = self.prev_hidden_state[index.to(self.prev_hidden_state.device)]

    def draft(self, call: LayerCall) -> Tensor:
        """Run the block on one token per row, given the call of the layer after the exit layer.

        Returns the block's estimate of the token's last hidden state before the final norm, (rows, D).
        """
        prev = self.draft_hidden_state if self.draft_hidden_state is not None else self.prev_hidden_state
        inputs = self._inputs(call, prev)
        state = self.point.head.state_of(self.run_whole(self.gate, inputs.args, inputs.kwargs))
        self.draft_hidden_state = self.unembed.normalize(state)
        return state[:, -1]

    def rollback(self, num_tokens: int) -> None:
        """Remove the K/V of the last `num_tokens` draft tokens."""
        crop(self.cache.layers[self.num_layers], num_tokens)

    def remember(self) -> None:
        """Store the block's state on the returned cache, for a later call with this cache."""
        (layer,) = self.cache.layers[self.num_layers :]
        setattr(self.cache, STATE_ATTRIBUTE, HeadState(self.point.identity, layer, self.prev_hidden_state))

    def finish(self) -> None:
        """Remove the block's layer from the cache."""
        del self.cache.layers[self.num_layers :]

    def _fill(self, call: LayerCall, final: Tensor) -> Tensor:
        """Write the block's K/V; return the last hidden states after the final norm, (rows, width, D)."""
        final = self.unembed.normalize(final)
        prev = self.prev_hidden_state
        if prev is None:  # the first token of the sequence
            prev = torch.zeros_like(final[:, :1])
        inputs = self._inputs(call, torch.cat([prev, final[:, :-1]], dim=1))
        fill_skipped(self.gate, inputs.args, inputs.kwargs)
        self.prev_hidden_state = final[:, -1:]
        return final

    def _inputs(self, call: LayerCall, prev_hidden_state: Tensor | None) -> LayerCall:
        device = call.state.device
        hidden_states = self.unembed.normalize(call.state).to(device)
        prev = prev_hidden_state.to(device) if prev_hidden_state is not None else torch.zeros_like(hidden_states)
        return call.on(device).with_state(on_device(self.point, call.state).head.translate(hidden_states, prev))


@dataclass
class _PendingPass:
    """A full-depth pass over a single row, for which the block's K/V are not filled yet; see [`BlockRun.observe`]."""

    call: LayerCall
    final: Tensor
    accepted: int


class LazyBlockRun(BlockRun):
    """A single-row run that fills the block's K/V lazily: when the block drafts, or after `MAX_PENDING_PASSES` passes.

    So a block that rarely drafts costs little. The block's layer is in the cache only while the block drafts.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        (self._layer,) = self.cache.layers[self.num_layers :]
        self._pending: list[_PendingPass] = []
        self.finish()

    @property
    def num_pending(self) -> int:
        """Number of passes for which the block's K/V are not filled yet."""
        return len(self._pending)

    def observe(self, call: LayerCall, final: Tensor) -> None:
        """Keep what is needed to fill the block's K/V for a full-depth pass later."""
        self._pending.append(_PendingPass(call, final, final.shape[1]))

    def commit(self, accepted: list[int]) -> None:
        """After a verify pass, continue after the first `accepted[0]` tokens of the pass."""
        self.draft_hidden_state = None
        self._pending[-1].accepted = accepted[0]
        if len(self._pending) >= MAX_PENDING_PASSES:
            self._catch_up()
            self.finish()

    def remember(self) -> None:
        """Fill pending K/V and store the block's state on the cache; see [`BlockRun.remember`]."""
        if self._pending:
            self._catch_up()
        elif len(self.cache.layers) == self.num_layers:
            self.cache.layers.append(self._layer)
        super().remember()

    def draft(self, call: LayerCall) -> Tensor:
        """Run the block on one token; see [`BlockRun.draft`]."""
        if self._pending:
            self._catch_up()
        return super().draft(call)

    def rollback(self, num_tokens: int) -> None:
        """Remove the K/V of the last `num_tokens` draft tokens."""
        super().rollback(num_tokens)
        self.finish()

    def _catch_up(self) -> None:
        self.cache.layers.append(self._layer)
        final = torch.cat([one.final[:, : one.accepted] for one in self._pending], dim=1)
        self._fill(_concatenated(self._pending), final)
        self._pending.clear()


def _concatenated(passes: list[_PendingPass]) -> LayerCall:
    """Merge the calls of several passes into one call over their accepted tokens, to fill the layer's K/V.

    Hidden states, positions and position embeddings are concatenated. Other arguments come from the last pass: a mask,
    for example, is not read before the K/V are stored.
    """
    if len(passes) == 1 and passes[0].accepted == passes[0].final.shape[1]:
        return passes[0].call
    widths = [one.final.shape[1] for one in passes]

    def concatenate(values: tuple[Any, ...]) -> Any:
        if isinstance(values[-1], tuple):
            return tuple(concatenate(elements) for elements in zip(*values, strict=True))
        for dim in range(3):
            if all(_has_tokens(value, width, dim) for value, width in zip(values, widths, strict=True)):
                accepted = [value.narrow(dim, 0, one.accepted) for value, one in zip(values, passes, strict=True)]
                return torch.cat(accepted, dim)
        return values[-1]

    args = tuple(concatenate(values) for values in zip(*(one.call.args for one in passes), strict=True))
    names = passes[-1].call.kwargs
    return LayerCall(args, {name: concatenate(tuple(one.call.kwargs[name] for one in passes)) for name in names})


def _has_tokens(value: Any, width: int, dim: int) -> bool:
    """Whether `value` is a tensor of a single row with one entry per token along `dim`.

    Such shapes are (width), (1, width), (1, width, D), and (kinds, 1, width, D) for multi-dimensional positions
    (mRoPE). A mask, (1, 1, width, slots), is excluded.
    """
    if not isinstance(value, Tensor) or value.ndim > (1, 3, 4)[dim]:
        return False
    if dim == 2:
        return value.ndim == 4 and value.shape[0] > 1 and value.shape[1:3] == (1, width)
    return value.shape[: dim + 1] == (1,) * dim + (width,)


def block_run(
    config: Any, structure: DecoderStructure, cache: Any, unembed: Unembed, routers: TIDERouters | None, lazy: bool
) -> BlockRun | None:
    """Make the run of a call in which the block head may draft; `None` without a block head or a usable cache.

    With `lazy`, for a single row only, the run is a [`LazyBlockRun`].
    """
    if routers is None or routers.block is None or type(cache) is not DynamicCache:
        return None
    if cache.offloading or len(cache.layers) != structure.num_layers:
        return None
    state = head_state_of(cache, routers.block.identity)
    if state is None:
        return None
    routers.block.head.use_attention_of(config)
    cache.layers.append(state.kv)
    kind = LazyBlockRun if lazy else BlockRun
    run = kind(structure, cache, unembed, routers.block, routers.config.block_layer)
    run.prev_hidden_state = state.prev_hidden_state
    return run
