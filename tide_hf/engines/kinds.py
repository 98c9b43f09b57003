"""The engines by name, with what each keeps between calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from ..common.choices import EAGER
from ..speculation.attachment import Attachment
from ..speculation.engine import Engine, EngineKind
from .capturable import facts_of, why_not_captured
from .eager import EagerEngine
from .static import StaticEngine
from .steps.captured_steps import CapturedSteps
from .steps.compiled_steps import CompiledSteps
from .steps.step_store import StepStore

logger = logging.getLogger(__name__)


class EagerKind:
    """`engine="eager"`: the model's own forward, which needs no warm-up."""

    warm_up_seconds = 0.0

    def showing_warm_up(self) -> AbstractContextManager[None]:
        """Show nothing."""
        return nullcontext()

    def engine(
        self,
        model: Any,
        attachment: Attachment,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Engine:
        """The engine of one call; see `EngineKind.engine`."""
        return EagerEngine(model, attachment, input_ids, generation_config, model_kwargs)

    def log_eager(self, reason: str) -> None:
        """Log nothing: all its calls do."""

    def release(self) -> None:
        """Do nothing, since nothing is kept."""


class CompiledKind:
    """`engine="compiled"`: steps of fixed shape, compiled on a CPU, and on a GPU captured as CUDA graphs as well.

    Attributes:
        steps: The model's steps, by device type.
    """

    def __init__(self) -> None:
        self.steps: dict[str, StepStore] = {"cpu": CompiledSteps(), "cuda": CapturedSteps()}
        self._logged: set[str] = set()

    @property
    def warm_up_seconds(self) -> float:
        """Seconds that preparing steps has taken so far."""
        return sum(steps.warm_up.seconds for steps in self.steps.values())

    @contextmanager
    def showing_warm_up(self) -> Iterator[None]:
        """Show a progress line on a terminal while steps are prepared."""
        with ExitStack() as lines:
            for steps in self.steps.values():
                lines.enter_context(steps.warm_up.shown())
            yield

    def engine(
        self,
        model: Any,
        attachment: Attachment,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Engine:
        """The engine of one call: static where the call can run on steps, else eager."""
        call = (model, attachment, input_ids, generation_config, model_kwargs)
        steps = self.steps.get(model.device.type)
        if steps is None:
            self.log_eager(f"there are no steps for {model.device.type!r}")
        elif (reason := why_not_captured(facts_of(model, steps, input_ids.shape[0], model_kwargs))) is not None:
            self.log_eager(reason)
        else:
            return StaticEngine(EagerEngine(*call, name="compiled", fills_block_lazily=False), steps)
        return EagerEngine(*call, name=EAGER)

    def log_eager(self, reason: str) -> None:
        """Log that a call runs eagerly, as a warning the first time for each reason."""
        level = logging.INFO if reason in self._logged else logging.WARNING
        logger.log(level, "engine='compiled' runs eagerly: %s", reason)
        self._logged.add(reason)

    def release(self) -> None:
        """Free buffers and graphs."""
        for steps in self.steps.values():
            steps.release()


def new_engines() -> dict[str, EngineKind]:
    """The engines of a model, by name."""
    return {EAGER: EagerKind(), "compiled": CompiledKind()}
