"""Steps of fixed shape on a GPU: draft steps by exit layer, verify passes by width, each captured as a CUDA graph.

The compiled step is captured, or the eager one if it cannot be compiled. A step that cannot be captured runs without a
graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from .capturable_forward import capturable_forward
from .compiled_steps import StepCompiler
from .progress import WarmUp
from .replay import Replay, replay_of
from .step_buffers import StepBuffers
from .step_graphs import compile_graph
from .step_store import StepStore

logger = logging.getLogger(__name__)


def inductor_steps() -> StepCompiler:
    """A step compiler that uses Inductor."""
    return StepCompiler(compile_graph)


class CapturedSteps(StepStore):
    """The steps of one model on a GPU, captured.

    Args:
        make_replay: Captures a step.
        layers: Makes the step compiler, which fuses a graph's small kernels; `None` captures steps uncompiled.
    """

    kind = "CUDA graphs"
    reads_drafts = False  # synchronising on each costs more than its score saves
    grows = False  # unfilled slots cost next to nothing, other steps much

    def __init__(
        self,
        make_replay: Callable[..., Replay] = replay_of,
        layers: Callable[[], Any] | None = inductor_steps,
    ) -> None:
        self.make_replay = make_replay
        super().__init__(layers, WarmUp("Capturing steps", "steps"))

    def __reduce__(self) -> tuple:
        """Copies and pickles of a model capture for themselves."""
        return CapturedSteps, (self.make_replay, self._make_layers)

    def release(self) -> None:
        """Free buffers and graphs."""
        super().release()
        self._pool: Any = None  # memory pool that the graphs share

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        with capturable_forward(buffers.parts.model, tokens):
            if self.layers is not None:
                compiled = self.layers.replay_of(function, buffers.state())
                if compiled.refused is not None:
                    logger.info("a step is captured uncompiled: %s", compiled.refused)
                function = partial(_run, compiled)  # keeps the compiled step alive
            replay = self.make_replay(function, buffers.state(), buffers.device, self._pool)
        self._pool = replay.pool
        return replay


def _run(compiled: Replay) -> Any:
    return compiled.run()
