"""Drafting by exit heads and the block head: steps through the shallow layers, in the cache of the call."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from ..depth.kv_cache import crop
from ..depth.skipping import FixedDepthRun, active, on_device
from ..unembed import DraftUnembed
from .costs import CostTable

if TYPE_CHECKING:
    from .speculation import SelfSpeculativeDecoder


class ShallowLayers:
    """The exit heads' view of a decoder: steps through the shallow layers, in the same cache."""

    runs_ahead = False

    def __init__(self, decoder: SelfSpeculativeDecoder) -> None:
        self.decoder = decoder
        self.layers_executed = 0
        self.depths: list[int] = []  # the exit layer at which each token since the last rollback was fed
        self.block_steps = 0
        self.unembed: DraftUnembed | None = None

    @property
    def block_layer(self) -> int | None:
        """Where the block drafts in this call, if it does."""
        return self.decoder.block.block_layer if self.decoder.block is not None else None

    @property
    def temperature(self) -> float:
        """Of this call's sampling; 0 for greedy decoding."""
        config = self.decoder.config
        return float(config.temperature or 1.0) if config.do_sample else 0.0

    def step(self, exit_layer: int, tokens: list[list[int]]) -> tuple[list[int], list[float]]:
        """Decode one token for each row, after the sequence and its `tokens`, at `exit_layer`."""
        decoder, start = self.decoder, perf_counter()
        attachment = decoder.attachment
        # What the block has to catch up with, beyond the last pass, is no part of what a step costs.
        is_usual = decoder.block is None or decoder.block.num_behind <= 1
        if self.unembed is None:
            self.unembed, is_usual = attachment.draft_unembed(), False
        run = FixedDepthRun(attachment.structure, decoder.slots.cache, exit_layer)
        run.execute_layer = decoder.run.execute_layer
        fed = len(self.depths)
        unseen = [[row.last, *drafted][fed:] for row, drafted in zip(decoder.batch, tokens, strict=True)]
        with active(run):
            call = run.call_after(decoder.forward, unseen, start=fed)
        if (cache := decoder.slots.cache).offloading:  # which has made the next layer ready, and not the first
            cache.prefetch(0, cache.only_non_sliding)
        if decoder.block is not None and exit_layer == decoder.block.block_layer:
            self.block_steps += 1
            top, log_probabilities = self.unembed.top1(decoder.block.draft(call))
            scores = decoder.block.point.score(log_probabilities)
        else:
            state = call.state[:, -1]
            exit_point = on_device(attachment.exit_point(exit_layer), state)
            scores = attachment.unembed.route(exit_point.router, state)
            top = self.unembed(exit_point.head(state))
        drafted = top.tolist()
        self.layers_executed += run.layers_executed
        self.depths += [exit_layer] * len(unseen[0])
        if is_usual and len(unseen[0]) == 1:
            milliseconds = decoder.ranks.agree((perf_counter() - start) * 1000)
            self.costs_of(len(unseen)).record(("draft", exit_layer), milliseconds)
        return drafted, scores.tolist()

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of a batch of `num_rows` in this call's engine."""
        return self.decoder.attachment.costs_of(num_rows, self.decoder.engine, self.decoder.widths)

    def rollback(self) -> None:
        """Take the draft tokens' K/V out of the shallow layers."""
        # Each layer is cropped once: a sliding-window layer forgets what lies before the window when it is cropped.
        for layer_idx in range(max(self.depths, default=0)):
            num_steps = sum(exit_layer > layer_idx for exit_layer in self.depths)
            crop(self.decoder.slots.cache.layers[layer_idx], num_steps)
        if self.decoder.block is not None and self.block_steps:
            self.decoder.block.rollback(self.block_steps)
        self.depths.clear()
        self.block_steps = 0
