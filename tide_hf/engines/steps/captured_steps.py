"""Steps of fixed shape on a GPU: a draft token at some depth, a verify pass of some width, each one CUDA graph.

What is captured is the compiled step, or the step as it is where it cannot be compiled. Without a graph the same
function runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from .capturable_forward import capturable_forward
from .compiled_steps import StepCompiler
from .replay import Replay, replay_of
from .step_buffers import StepBuffers
from .step_graphs import compile_graph
from .step_store import StepStore
from .warm_up import WarmUp

logger = logging.getLogger(__name__)


def inductor_steps() -> StepCompiler:
    """What compiles steps by Inductor."""
    return StepCompiler(compile_graph)


class CapturedSteps(StepStore):
    """The steps of one model on a GPU, captured.

    Args:
        make_replay: What makes a step ready to run again.
        layers: Makes what compiles a step, so that its graph has few and large kernels; `None` leaves it as it is.
    """

    kind = "CUDA graphs"
    reads_drafts = False  # waiting for each would cost more than what is known from it
    grows = False  # slots that are not filled cost next to nothing, and other steps much

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
        """Give buffers and graphs back."""
        super().release()
        self._pool: Any = None  # the graphs' memory

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        with capturable_forward(buffers.parts.model, tokens):
            if self.layers is not None:
                compiled = self.layers.replay_of(function, buffers.state())
                if compiled.refused is not None:
                    logger.info("a step is captured as it is: %s", compiled.refused)
                function = partial(_run, compiled)  # which keeps all that it needs alive
            replay = self.make_replay(function, buffers.state(), buffers.device, self._pool)
        self._pool = replay.pool
        return replay


def _run(compiled: Replay) -> Any:
    return compiled.run()
