"""The exit heads' view of the self-speculative loop on captured steps: draft steps on fixed buffers."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from ..decoding.costs import CostTable
from ..decoding.shallow import ShallowLayers

if TYPE_CHECKING:
    from .captured_decoding import CapturedDecoder


class CapturedShallow(ShallowLayers):
    """The exit heads' view of a captured decoder: chains of draft steps that nobody waits for."""

    decoder: CapturedDecoder

    def __init__(self, decoder: CapturedDecoder) -> None:
        super().__init__(decoder)
        self.num_ahead = 0
        self.exit_layer = 0
        self.marks: list[Any] = []

    @property
    def runs_ahead(self) -> bool:  # type: ignore[override]
        """Whether drafts are not read; not where the call goes on eagerly."""
        return self.decoder.buffers is not None and not self.decoder.steps.reads_drafts

    def step(self, exit_layer: int, tokens: list[list[int]]) -> tuple[list[int], list[float]]:
        """As `ShallowLayers.step`, one draft step for each token that the exit layer has not seen."""
        decoder = self.decoder
        if decoder.buffers is None:
            return super().step(exit_layer, tokens)
        start, fed = perf_counter(), len(self.depths)
        if fed == 0:
            decoder.upload([[row.last] for row in decoder.batch])
        buffers = decoder.buffers
        num_steps = len(tokens[0]) + 1 - fed
        for position in range(num_steps):
            if fed + position:
                buffers.feed(decoder.row_map.spread([drafted[fed + position - 1] for drafted in tokens]))
            self.layers_executed += decoder.steps.run(buffers, "draft", exit_layer).num_layers
        self.depths += [exit_layer] * num_steps
        drafted, scores = buffers.read_draft()
        if decoder.is_warm:
            self.costs_of(len(tokens)).record(("draft", exit_layer), (perf_counter() - start) * 1000 / num_steps)
        return decoder.row_map.gather(drafted), decoder.row_map.gather(scores)

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of steps over the rows that the buffers have, however many of them belong to a sequence."""
        return super().costs_of(num_rows if self.decoder.buffers is None else self.decoder.buffers.rows)

    def rollback(self) -> None:
        """Forget the drafts; a verify pass writes over their K/V."""
        if self.decoder.buffers is None:
            super().rollback()
        else:
            self.depths.clear()

    def run_ahead(self, exit_layer: int, num_tokens: int) -> None:
        """Draft so many tokens for each row, which nobody reads before they are verified."""
        decoder = self.decoder
        decoder.upload([[row.last] for row in decoder.batch])
        buffers = decoder.ready
        self.marks = [_mark(buffers.device)]
        for _ in range(num_tokens):
            step = decoder.steps.run(buffers, "draft", exit_layer)
            self.layers_executed += step.num_layers
        self.marks.append(_mark(buffers.device))
        self.num_ahead, self.exit_layer = num_tokens, exit_layer

    def take_share(self, milliseconds: float) -> float:
        """Record what the drafts took of a round that is over; return what is left."""
        if not self.num_ahead:
            return milliseconds
        before, after = self.marks
        drafts = before.elapsed_time(after) if isinstance(before, torch.cuda.Event) else (after - before) * 1000
        if self.decoder.is_warm:
            self.costs_of(len(self.decoder.batch)).record(("draft", self.exit_layer), drafts / self.num_ahead)
        self.num_ahead = 0
        return max(0.0, milliseconds - drafts)


def _mark(device: torch.device) -> Any:
    """A point in time of the device's work; no wait."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
