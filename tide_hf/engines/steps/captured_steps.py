"""Steps of fixed shape on a GPU: a draft token at some depth, a verify pass of some width, each one CUDA graph.

Inside them run compiled layers, where those can be had. Without a graph the same function runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ...common.errors import UnsupportedOptionError, describe
from .capturable_forward import capturable_forward
from .compiled_layers import CompiledLayers
from .replay import Replay, replay_of
from .step_buffers import StepBuffers
from .step_store import StepStore
from .warm_up import WarmUp

logger = logging.getLogger(__name__)


class CapturedSteps(StepStore):
    """The steps of one model on a GPU, captured.

    Args:
        make_replay: What makes a step ready to run again.
        layers: Compiles the layers, so that a graph has few and large kernels; `None` leaves them as they are.
    """

    kind = "CUDA graphs"
    reads_drafts = False  # waiting for each would cost more than what is known from it
    grows = False  # slots that are not filled cost next to nothing, and other steps much

    def __init__(
        self,
        make_replay: Callable[..., Replay] = replay_of,
        layers: Callable[[], Any] | None = CompiledLayers,
    ) -> None:
        self.make_replay = make_replay
        self._said: set[str] = set()
        super().__init__(layers, WarmUp("Capturing steps", "steps"))

    def __reduce__(self) -> tuple:
        """Copies and pickles of a model capture for themselves."""
        return CapturedSteps, (self.make_replay, self._make_layers)

    def release(self) -> None:
        """Give buffers and graphs back."""
        super().release()
        self._pool: Any = None  # the graphs' memory

    def log_eager(self, reason: str) -> None:
        """Log that a call does without, once for each reason."""
        if reason not in self._said:
            logger.warning("engine='cuda_graph' runs eagerly: %s", reason)
        self._said.add(reason)

    def check_device(self, device: torch.device) -> None:
        """Refuse a model on a device that has no graphs.

        Raises:
            UnsupportedOptionError: It is not on a CUDA GPU.
        """
        if self.make_replay is replay_of and device.type != "cuda":
            raise UnsupportedOptionError(
                describe(
                    "engine='cuda_graph' needs a GPU",
                    got=f"a model on {device.type!r}",
                    expected="a model on one CUDA GPU",
                    do="Move the model there, or pass engine='compiled', which runs on CPUs.",
                )
            )

    def _replay_of(self, function: Callable[[], Any], buffers: StepBuffers, kind: str, tokens: int) -> Replay:
        parts = buffers.parts
        layers = self.layers.ready(list(parts.structure.layers)) if self.layers is not None else nullcontext()
        with layers, capturable_forward(parts.model, tokens):
            replay = self.make_replay(function, buffers.state(), buffers.device, self._pool)
        self._pool = replay.pool
        return replay
