"""`early_exit` with exit layers on steps of fixed shape: a static engine whose passes end once all rows have exited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor

from ..common.errors import UnsupportedOptionError
from ..depth.early_exit import ExitOptions
from ..speculation.engine import Engine
from .eager import EagerEngine
from .static import StaticEngine
from .steps.exit_steps import SEGMENT_WIDTHS, WINDOW, ExitSteps, Segment
from .steps.step_store import StepStore


class StepsHeldError(Exception):
    """Another call holds the steps of the model."""


class StaticExitEngine(StaticEngine):
    """Runs one call of `early_exit`, without drafts; every row adds one token in each pass.

    With `recompute`, the K/V that skipped layers lack are computed when a later token needs them: `_window` has the
    tokens of each row that have exited since all layers last ran, and `_depths` how many layers each has executed. A
    token needs the K/V of those before it, so depths never increase from one token of the window to the next.
    """

    def __init__(self, eager: EagerEngine, steps: StepStore, options: ExitOptions) -> None:
        super().__init__(eager, steps)
        self.options, self.kept_layers = options, tuple(options.routers.exit_layers)
        boundaries = [0, *(options.exit_layers if options.may_exit else ()), eager.attachment.structure.num_layers]
        self._segments = list(pairwise(boundaries))
        self._window: list[list[int]] = [[] for _ in eager.rows]
        self._depths: list[int] = []
        self._exits: list[int] = []  # of each row's last token, the layers after which it was chosen

    @property
    def steps_of_exits(self) -> ExitSteps:
        """The steps of segments and exits."""
        exits = self.buffers.exits
        assert exits is not None  # `kept_layers` are not empty
        return exits

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `StaticEngine.running`; raises [`StepsHeldError`] before anything has run."""
        with super().running():
            if not self._has_steps:
                raise StepsHeldError
            yield

    def decoder(self, room: int) -> Engine:
        """This engine; raises [`UnsupportedOptionError`] if the call cannot run on steps after all."""
        if super().decoder(room) is not self:
            raise UnsupportedOptionError(
                "early_exit cannot run on steps of fixed shape here",
                got="no memory for them, or a cache or positions that they do not have",
                expected="a model that the compiled engine supports, and memory for a static cache",
                do="Pass tide_engine='eager' in this call.",
            )
        return self

    def verify(self, drafted: list[list[int]]) -> None:
        """Run one pass over each row's last token, up to the layer where all rows have exited."""
        if len(self._depths) == WINDOW - 1:
            self._catch_up()
        self._begin([[*window, last] for window, last in zip(self._window, self.last_tokens, strict=True)])
        self._depths.append(0)
        steps, exits = self.steps_of_exits, [self._segments[-1][1]] * self.buffers.rows
        for begin, end in self._segments:
            logits = self._run_segment(begin, end)
            if logits is not None:
                break
            before, exits = exits, steps.read()
            self.steps.reads += 1
            if exits != before:
                self._run("exit_head", end)
            if max(exits) <= end:
                logits = self._run("exit_logits", 0)
                self._skip_behind(end)
                break
        self._logits, self._exits = logits, self._rows.gather(exits)

    def depths(self) -> list[int]:
        """For each row, the layers after which its token of the last pass was chosen."""
        return self._exits

    def inputs(self) -> Tensor:
        """(rows, 1) tokens that the last pass read."""
        current = len(self._window[0])
        return self.buffers.ids[self._own, current : current + 1]

    def commit(self, new_tokens: list[list[int]]) -> None:
        """Keep the K/V of the last pass's tokens, which later layers may still lack."""
        for window, last in zip(self._window, self.last_tokens, strict=True):
            window.append(last)
            if not self._depths:
                window.clear()
        super().commit(new_tokens)

    def select(self, rows: list[int]) -> None:
        """Keep only these sequences."""
        self._catch_up()
        self._window = [self._window[row] for row in rows]
        super().select(rows)

    def finish(self, settle: bool) -> Any:
        """Copy the K/V back, complete in every layer, if the caller receives the cache."""
        if self.eager.is_returned and self._buffers is not None:
            self._catch_up()
        return super().finish(settle)

    @property
    def _is_warm(self) -> bool:
        """Never, since the time of a pass that may end early says nothing of full ones."""
        return False

    def _skip_behind(self, exit_layer: int) -> None:
        """After an exit of all rows: fill the K/V of the deeper layers, or leave them to a later token."""
        if self.options.strategy != "recompute":
            self._run(self.options.strategy, exit_layer)
            self._depths.clear()

    def _catch_up(self) -> None:
        """Run the layers that the tokens of the window have skipped."""
        if not self._depths:
            return
        self._begin(self._window)
        for begin, end in self._segments:
            if begin >= self._depths[-1]:
                self._run_segment(begin, end)
        for window in self._window:
            window.clear()

    def _begin(self, window: list[list[int]]) -> None:
        """Upload a window of tokens: those of `_depths`, and perhaps one more. The last one is the current one."""
        self._drafted, self._results, self._width = [[] for _ in window], None, 1
        self._upload(window, back=len(self._depths))
        self.steps_of_exits.begin(self.options.exit_threshold, len(window[0]) - 1)

    def _run_segment(self, begin: int, end: int) -> Tensor | None:
        """Run the tokens of the window that have reached `begin` through the next segment; return logits after it."""
        first, last = self._depths.index(begin), len(self._depths) - 1
        width = next(width for width in SEGMENT_WIDTHS if width > last - first)
        first = min(first, WINDOW - width)  # so that padding stays in the window; what runs again gives the same
        self.steps_of_exits.first.fill_(first)
        freezes = self.options.strategy != "recompute"
        logits = self._run("segment", Segment(begin, end, width, self.options.exit_criterion, freezes))
        self._depths = [max(depth, end) if index >= first else depth for index, depth in enumerate(self._depths)]
        if logits is not None:
            self._depths.clear()
        return logits

    def _run(self, kind: str, size: Any) -> Any:
        step = self.steps.run(self.buffers, kind, size)
        self._layers += step.num_layers
        return step.logits
