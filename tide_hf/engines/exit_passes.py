"""The passes of `early_exit` with exit layers on steps of fixed shape, which end once all rows have exited."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor

from ..depth.early_exit import ExitOptions
from .steps.exit_steps import SEGMENT_WIDTHS, WINDOW, Segment
from .steps.step_buffers import StepBuffers


class StepRunner(Protocol):
    """The part of the static engine that passes use."""

    buffers: StepBuffers

    @property
    def last_tokens(self) -> list[int]:
        """Each row's last token, the next pass's input."""

    def upload(self, ids: list[list[int]], back: int = 0) -> None:
        """Upload the tokens of each row, which begin `back` tokens before the last one."""

    def run_step(self, kind: str, size: Any) -> Any:
        """Run a step; return its logits."""

    def read_exits(self) -> list[int]:
        """Wait for a segment; return the exit layer of each row, the number of layers if it has none."""


class ExitPasses:
    """Runs the passes of one call, each of which gives one token for every row.

    The K/V that skipped layers lack are computed when a later token needs them: `_window` has the tokens of each row
    that have exited since all layers last ran, and `_depths` how many layers each has executed. A
    token needs the K/V of those before it, so depths never increase from one token of the window to the next.
    """

    def __init__(self, options: ExitOptions, num_layers: int, rows: int) -> None:
        self.options, self.kept_layers = options, tuple(options.routers.exit_layers)
        self._segments = list(pairwise([0, *options.exit_layers, num_layers]))
        self._window: list[list[int]] = [[] for _ in range(rows)]
        self._depths: list[int] = []
        self.exits: list[int] = []  # of each row's last token, the layers after which it was chosen

    @property
    def current(self) -> int:
        """Index of the token of the pass, among the tokens that were uploaded with it."""
        return len(self._window[0])

    def run(self, runner: StepRunner) -> Tensor:
        """Run one pass over each row's last token, up to the layer where all rows have exited; return logits."""
        if len(self._depths) == WINDOW - 1:
            self.catch_up(runner)
        self._begin(runner, [[*window, last] for window, last in zip(self._window, runner.last_tokens, strict=True)])
        self._depths.append(0)
        self.exits = [self._segments[-1][1]] * len(self._window)
        for begin, end in self._segments:
            logits = self._run_segment(runner, begin, end)
            if logits is not None:
                break
            before, self.exits = self.exits, runner.read_exits()
            if self.exits != before:
                runner.run_step("exit_head", end)
            if max(self.exits) <= end:
                logits = runner.run_step("exit_logits", 0)
                break
        assert logits is not None  # those of the last segment, at the latest
        return logits

    def commit(self, last_tokens: list[int]) -> None:
        """Keep the tokens of the last pass, whose K/V may lack in deeper layers."""
        for window, last in zip(self._window, last_tokens, strict=True):
            window.append(last)
            if not self._depths:
                window.clear()

    def select(self, runner: StepRunner, rows: list[int]) -> None:
        """Keep only these sequences."""
        self.catch_up(runner)
        self._window = [self._window[row] for row in rows]

    def catch_up(self, runner: StepRunner) -> None:
        """Run the layers that the tokens of the window have skipped."""
        if not self._depths:
            return
        self._begin(runner, self._window)
        for begin, end in self._segments:
            if begin >= self._depths[-1]:
                self._run_segment(runner, begin, end)
        for window in self._window:
            window.clear()

    def _begin(self, runner: StepRunner, window: list[list[int]]) -> None:
        """Upload a window of tokens: those of `_depths`, and perhaps one more. The last one is the current one."""
        runner.upload(window, back=len(self._depths))
        runner.buffers.exit_steps.begin(self.options.exit_threshold, len(window[0]) - 1)

    def _run_segment(self, runner: StepRunner, begin: int, end: int) -> Tensor | None:
        """Run the tokens of the window that have reached `begin` through the next segment; return logits after it."""
        first, last = self._depths.index(begin), len(self._depths) - 1
        width = next(width for width in SEGMENT_WIDTHS if width > last - first)
        first = min(first, WINDOW - width)  # so that padding stays in the window; what runs again gives the same
        runner.buffers.exit_steps.first.fill_(first)
        logits: Tensor | None = runner.run_step("segment", Segment(begin, end, width, self.options.exit_criterion))
        self._depths = [max(depth, end) if index >= first else depth for index, depth in enumerate(self._depths)]
        if logits is not None:
            self._depths.clear()
        return logits
