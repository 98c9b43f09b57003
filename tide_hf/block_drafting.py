"""How the block head takes part in one self-speculative call: its K/V, and the deep states that it leans on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from .kv_cache import fill_skipped
from .modeling_tide import BlockPoint, TIDERouters
from .skipping import LayerCall, LayerGate, LayerRun
from .structure import DecoderStructure
from .unembed import Unembed


class BlockRun(LayerRun):
    """Full-depth passes that leave the block what it needs: K/V for the new tokens, and their final states.

    The block's K/V stand in the same cache, in one layer more, so that whatever crops, compacts or selects the rows of
    the base model's layers does the same to the block's.

    Args:
        structure: The base model's structure.
        cache: The cache of the call, with a layer for the block behind the model's own.
        unembed: The base model's unembedding.
        point: Router and block head.
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
        self.deep_before: Tensor | None = None  # (rows, 1, D) normalised final state of the last token of the cache
        self.drafted: Tensor | None = None  # the same as the block has it, behind tokens that it drafted
        self._call: LayerCall | None = None
        self.final: Tensor | None = None  # (rows, width, D) normalised final states of the last pass

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the layer; note the call behind the block's exit layer, and the final state."""
        if gate.layer_idx == self.block_layer:
            self._call = LayerCall(args, kwargs)
        output = self.execute(gate, args, kwargs)
        if gate.layer_idx == self.num_layers - 1 and self._call is not None:
            self._extend(self._call, gate.state_of(output))
            self._call = None
        return output

    def keep(self, accepted: list[int]) -> None:
        """After a verify pass: go on behind the first `accepted[row]` of its tokens."""
        if self.final is None:
            return
        rows = torch.arange(len(accepted), device=self.final.device)
        last = torch.tensor(accepted, device=self.final.device) - 1
        self.deep_before = self.final[rows, last.clamp(min=0)][:, None]
        self.drafted = None

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

    def finish(self) -> None:
        """Take the block's K/V out of the cache."""
        del self.cache.layers[self.num_layers :]

    def _extend(self, call: LayerCall, final: Tensor) -> None:
        """Store the block's K/V for the tokens of a full-depth pass."""
        self.final = self._normalize(final)
        before = self.deep_before
        if before is None:  # the first token has none before it
            before = torch.zeros_like(self.final[:, :1])
        inputs = self._inputs(call, torch.cat([before, self.final[:, :-1]], dim=1))
        fill_skipped(self.gate, inputs.args, inputs.kwargs)
        self.deep_before = self.final[:, -1:]

    def _inputs(self, call: LayerCall, deep_before: Tensor | None) -> LayerCall:
        early = self.unembed.normalize(call.state)
        deep = deep_before.to(early.device) if deep_before is not None else torch.zeros_like(early)
        return call.with_state(self.point.head.translate(early, deep))

    def _normalize(self, state: Tensor) -> Tensor:
        return self.unembed.normalize(state)


def block_run(
    config: Any, structure: DecoderStructure, cache: Any, unembed: Unembed, routers: TIDERouters | None
) -> BlockRun | None:
    """The run of a call in which the block drafts; `None` where there is no block or no K/V for what is cached.

    Args:
        config: The base model's text config.
        structure: Its structure.
        cache: The cache of the call.
        unembed: The base model's unembedding.
        routers: The model's routers, if any.
    """
    if routers is None or routers.block is None or type(cache) is not DynamicCache:
        return None
    if cache.get_seq_length() > 0 or cache.offloading or len(cache.layers) != structure.num_layers:
        return None
    routers.block.head.use_attention_of(config)
    cache.layers.append(DynamicLayer())
    return BlockRun(structure, cache, unembed, routers.block, routers.config.block_layer)
