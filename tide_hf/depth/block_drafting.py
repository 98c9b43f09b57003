"""How the block head takes part in one self-speculative call: its K/V, and the deep states that it leans on."""

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
from .block_memory import BlockMemory, memory_of
from .gates import LayerCall, LayerGate, LayerRun, on_device
from .kv_cache import crop, fill_skipped


class BlockRun(LayerRun):
    """Full-depth passes that leave the block what it needs: K/V for the new tokens, and their final states.

    The block's K/V stand in the same cache, in one layer more, so that whatever crops, compacts or selects the rows of
    the base model's layers does the same to the block's.

    Args:
        structure: The base model's structure.
        cache: The cache of the call, with a layer for the block behind the model's own.
        unembed: The base model's unembedding.
        point: Block head and its confidence.
        block_layer: Number of executed layers after which the block drafts.
    """

    def __init__(
        self, structure: DecoderStructure, cache: Any, unembed: Unembed, point: BlockPoint, block_layer: int
    ) -> None:
        super().__init__(structure, cache)
        self.unembed = unembed
        self.point = point
        self.block_layer = block_layer
        self.gate = LayerGate(point.head.layer, structure.num_layers, point.head.returns_tuple)
        self.deep_before: Tensor | None = None  # (rows, 1, D) normalised final state of the last token of the K/V
        self.drafted: Tensor | None = None  # the same as the block has it, behind tokens that it drafted
        self._call: LayerCall | None = None
        self.final: Tensor | None = None  # (rows, width, D) normalised final states of the last pass

    @contextmanager
    def reading_into(self, cache: Any) -> Iterator[None]:
        """As [`LayerRun.reading_into`]; no token stands before these rows' first."""
        self.deep_before = None
        with super().reading_into(cache):
            yield

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the layer; note the call behind the block's exit layer, and the final state."""
        if gate.layer_idx == self.block_layer:
            self._call = LayerCall(args, kwargs)
        output = self.execute(gate, args, kwargs)
        if gate.layer_idx == self.num_layers - 1 and self._call is not None:
            self.take(self._call, gate.state_of(output))
            self._call = None
        return output

    @property
    def num_behind(self) -> int:
        """Passes whose K/V the block has yet to fill in."""
        return 0

    def take(self, call: LayerCall, final: Tensor) -> None:
        """Store the block's K/V for the tokens of a full-depth pass.

        Args:
            call: With what the layer behind the block's exit layer was called.
            final: (rows, width, D) states after the last layer.
        """
        self.final = self._fill(call, final)

    def keep(self, accepted: list[int]) -> None:
        """After a verify pass: go on behind the first `accepted[row]` of its tokens."""
        if self.final is None:
            return
        self.keep_state(self.final, accepted)
        self.drafted = None

    def keep_state(self, final: Tensor, accepted: list[int]) -> None:
        """Go on behind the first `accepted[row]` tokens of a pass with these final states, (rows, width, D)."""
        rows = torch.arange(len(accepted), device=final.device)
        last = torch.tensor(accepted, device=final.device) - 1
        self.deep_before = final[rows, last.clamp(min=0)][:, None]

    def select(self, index: Tensor) -> None:
        """Keep only these rows."""
        if self.deep_before is not None:
            self.deep_before = self.deep_before[index.to(self.deep_before.device)]

    def draft(self, call: LayerCall) -> Tensor:
        """Run the block on one token for each row.

        Args:
            call: What the layer behind the exit would have been called with, width 1.

        Returns:
            (rows, D) the block's guess at the token's final state.
        """
        before = self.drafted if self.drafted is not None else self.deep_before
        inputs = self._inputs(call, before)
        state = self.point.head.state_of(self.run_whole(self.gate, inputs.args, inputs.kwargs))
        self.drafted = self._normalize(state)
        return state[:, -1]

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` that it drafted."""
        crop(self.cache.layers[self.num_layers], num_tokens)

    def remember(self) -> None:
        """Leave with the cache, which is returned, what a call takes that goes on behind it."""
        (layer,) = self.cache.layers[self.num_layers :]
        BlockMemory(self.point.identity, layer, self.deep_before).leave_with(self.cache)

    def finish(self) -> None:
        """Take the block's K/V out of the cache."""
        del self.cache.layers[self.num_layers :]

    def _fill(self, call: LayerCall, final: Tensor) -> Tensor:
        """Store K/V; return the normalised final states, (rows, width, D)."""
        final = self._normalize(final)
        before = self.deep_before
        if before is None:  # the first token has none before it
            before = torch.zeros_like(final[:, :1])
        inputs = self._inputs(call, torch.cat([before, final[:, :-1]], dim=1))
        fill_skipped(self.gate, inputs.args, inputs.kwargs)
        self.deep_before = final[:, -1:]
        return final

    def _inputs(self, call: LayerCall, deep_before: Tensor | None) -> LayerCall:
        device = call.state.device
        early = self.unembed.normalize(call.state).to(device)
        deep = deep_before.to(device) if deep_before is not None else torch.zeros_like(early)
        return call.on(device).with_state(on_device(self.point, call.state).head.translate(early, deep))

    def _normalize(self, state: Tensor) -> Tensor:
        return self.unembed.normalize(state)


MOST_BEHIND = 64  # passes; what is kept of them takes memory


@dataclass
class _Pass:
    """What a full-depth pass leaves behind for the block's K/V.

    Attributes:
        call: With what the layer behind the block's exit layer was called.
        final: (1, width, D) states after the last layer.
        kept: The first so many of its tokens are part of the sequence.
    """

    call: LayerCall
    final: Tensor
    kept: int


class LateBlockRun(BlockRun):
    """For a single row: K/V are filled in when the block is about to draft, for all passes since it last did.

    Where it never drafts it costs nothing. Its layer is in the cache only while it drafts.
    """

    def __init__(
        self, structure: DecoderStructure, cache: Any, unembed: Unembed, point: BlockPoint, block_layer: int
    ) -> None:
        super().__init__(structure, cache, unembed, point, block_layer)
        (self._layer,) = cache.layers[self.num_layers :]
        self._behind: list[_Pass] = []
        self.finish()

    @property
    def num_behind(self) -> int:
        """Passes whose K/V the block has yet to fill in."""
        return len(self._behind)

    def take(self, call: LayerCall, final: Tensor) -> None:
        """Keep what K/V for the tokens of a full-depth pass take."""
        self._behind.append(_Pass(call, final, final.shape[1]))

    def keep(self, accepted: list[int]) -> None:
        """After a verify pass: go on behind the first `accepted[0]` of its tokens."""
        self.drafted = None
        self._behind[-1].kept = accepted[0]
        if len(self._behind) >= MOST_BEHIND:
            self._catch_up()
            self.finish()

    def remember(self) -> None:
        """Fill in what is missing, and leave it with the cache; see [`BlockRun.remember`]."""
        if self._behind:
            self._catch_up()
        elif len(self.cache.layers) == self.num_layers:
            self.cache.layers.append(self._layer)
        super().remember()

    def draft(self, call: LayerCall) -> Tensor:
        """Run the block on one token; see [`BlockRun.draft`]."""
        if self._behind:
            self._catch_up()
        return super().draft(call)

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` that it drafted."""
        super().rollback(num_tokens)
        self.finish()

    def _catch_up(self) -> None:
        self.cache.layers.append(self._layer)
        self._fill(_joined(self._behind), torch.cat([one.final[:, : one.kept] for one in self._behind], dim=1))
        self._behind.clear()


def _joined(passes: list[_Pass]) -> LayerCall:
    """One call for the kept tokens of several passes, as far as a layer's K/V depend on it.

    States, positions and their embeddings are laid side by side. Anything else is the last pass's: a mask, for one,
    plays no part before K/V are stored.
    """
    if len(passes) == 1 and passes[0].kept == passes[0].final.shape[1]:
        return passes[0].call
    widths = [one.final.shape[1] for one in passes]

    def join(values: tuple[Any, ...]) -> Any:
        if isinstance(values[-1], tuple):
            return tuple(join(parts) for parts in zip(*values, strict=True))
        for dim in range(3):
            if all(_has_tokens(value, width, dim) for value, width in zip(values, widths, strict=True)):
                return torch.cat(
                    [value.narrow(dim, 0, one.kept) for value, one in zip(values, passes, strict=True)], dim
                )
        return values[-1]

    args = tuple(join(values) for values in zip(*(one.call.args for one in passes), strict=True))
    names = passes[-1].call.kwargs
    return LayerCall(args, {name: join(tuple(one.call.kwargs[name] for one in passes)) for name in names})


def _has_tokens(value: Any, width: int, dim: int) -> bool:
    """Whether `dim` of a tensor of a single row counts the tokens of a pass.

    Shapes are (width), (1, width), (1, width, D), and (kinds, 1, width, D) of positions of several kinds; others are
    masks, (1, 1, width, slots), if anything.
    """
    if not isinstance(value, Tensor) or value.ndim > (1, 3, 4)[dim]:
        return False
    if dim == 2:
        return value.ndim == 4 and value.shape[0] > 1 and value.shape[1:3] == (1, width)
    return value.shape[: dim + 1] == (1,) * dim + (width,)


def block_run(
    config: Any, structure: DecoderStructure, cache: Any, unembed: Unembed, routers: TIDERouters | None, late: bool
) -> BlockRun | None:
    """The run of a call in which the block drafts; `None` where there is no block or no K/V for what is cached.

    For that there are some where another call of a block drafted before, and returned the cache.

    Args:
        config: The base model's text config.
        structure: Its structure.
        cache: The cache of the call.
        unembed: The base model's unembedding.
        routers: The model's routers, if any.
        late: Whether K/V are filled in when the block is about to draft, which a single row can do.
    """
    if routers is None or routers.block is None or type(cache) is not DynamicCache:
        return None
    if cache.offloading or len(cache.layers) != structure.num_layers:
        return None
    memory = memory_of(cache, routers.block.identity)
    if memory is None:
        return None
    routers.block.head.use_attention_of(config)
    cache.layers.append(memory.layer)
    kind = LateBlockRun if late else BlockRun
    run = kind(structure, cache, unembed, routers.block, routers.config.block_layer)
    run.deep_before = memory.deep_before
    return run
