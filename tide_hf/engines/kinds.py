"""The engines by name, their state between calls, and which calls can run on steps of fixed shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..base_model.inputs import is_absent, names_of_prompt_inputs
from ..base_model.structure import CACHE
from ..common.choices import EAGER
from ..depth.early_exit import ExitOptions
from ..speculation.attachment import Attachment
from ..speculation.call import Call
from ..speculation.protocols import Engine, EngineKind, Pass
from ..speculation.ranks import ranks_of
from .eager import prefill_eagerly
from .exit_passes import ExitPasses
from .gqa_attention import attention_of
from .static_prefill import prefill_on_steps, prefill_without_steps
from .steps.step_store import CapturedSteps, CompiledSteps, StepStore

KNOWN_ARGUMENTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_position"}
ATTENTION = ("eager", "sdpa")
LAYER_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)

logger = logging.getLogger(__name__)


class EagerKind:
    """`engine="eager"`: the model's own forward, which needs no warm-up."""

    warm_up_seconds = 0.0

    def prefill(self, model: Any, attachment: Attachment, call: Call) -> tuple[Pass, Engine]:
        """See `EngineKind.prefill`."""
        return prefill_eagerly(model, attachment, call)

    def prefill_exits(self, *_: Any) -> str:
        """The reason why calls of `early_exit` with exit layers do not run on this engine's passes."""
        return "their layers run one by one"

    def showing_warm_up(self) -> AbstractContextManager[None]:
        """Show nothing."""
        return nullcontext()

    def log_eager(self, reason: str) -> None:
        """Log nothing, since all calls run eagerly."""

    def release(self) -> None:
        """Do nothing, since nothing is kept."""


class CompiledKind:
    """`engine="compiled"`: steps of fixed shape, which are compiled and on a GPU also captured as CUDA graphs."""

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

    def prefill(self, model: Any, attachment: Attachment, call: Call) -> tuple[Pass, Engine]:
        """See `EngineKind.prefill`; the engine is static where the call can run on steps, else eager."""
        steps = self._steps_for(model, call)
        if not isinstance(steps, StepStore):
            self.log_eager(steps)
            return prefill_eagerly(model, attachment, call)
        if not steps.hold():
            return prefill_without_steps(model, attachment, call)
        return prefill_on_steps(model, attachment, call, steps)

    def prefill_exits(
        self, model: Any, attachment: Attachment, call: Call, options: ExitOptions
    ) -> tuple[Pass, Engine] | str:
        """See `EngineKind.prefill_exits`."""
        steps = self._steps_for(model, call)
        if not isinstance(steps, StepStore):
            return steps
        if not steps.hold():
            return "another call holds the steps"
        rows, num_layers = len(call.input_ids), attachment.structure.num_layers
        passes = ExitPasses(options, num_layers, rows) if options.may_exit else None
        return prefill_on_steps(model, attachment, call, steps, passes=passes, requires_steps=True)

    def _steps_for(self, model: Any, call: Call) -> StepStore | str:
        """The steps that a call can run on; or the reason why it cannot."""
        steps = self.steps.get(model.device.type)
        if steps is None:
            return f"there are no steps for {model.device.type!r}"
        return steps.refused or why_eager(model, call.model_kwargs) or steps

    def log_eager(self, reason: str) -> None:
        """Log that a call runs eagerly; the first time for each reason, as a warning."""
        level = logging.INFO if reason in self._logged else logging.WARNING
        logger.log(level, "engine='compiled' runs eagerly: %s", reason)
        self._logged.add(reason)

    def release(self) -> None:
        """Free buffers and graphs; those that a call uses, at its end."""
        for steps in self.steps.values():
            steps.release()


def new_engines() -> dict[str, EngineKind]:
    """The engines of a model, by name."""
    return {EAGER: EagerKind(), "compiled": CompiledKind()}


def why_eager(model: Any, model_kwargs: dict[str, Any]) -> str | None:
    """The reason why a call cannot run on steps of fixed shape; `None` if it can."""
    cache, config = model_kwargs[CACHE], model.config.get_text_config()
    attention = attention_of(config)
    offloaded = {device for device in getattr(model, "hf_device_map", {}).values() if device in ("cpu", "disk")}
    devices = {str(parameter.device) for parameter in model.parameters()} | {str(device) for device in offloaded}
    layers = {type(layer).__name__ for layer in cache.layers if type(layer) not in LAYER_KINDS}
    passed = {name for name, value in model_kwargs.items() if not is_absent(value)}
    unknown = passed - names_of_prompt_inputs(model) - KNOWN_ARGUMENTS
    supported = model._can_compile_fullgraph or getattr(model, "_supports_attention_backend", False)
    reasons = {
        f"the model is spread over {', '.join(sorted(devices))}": len(devices) != 1,
        "processes share the model, and measure costs together": ranks_of(model).many,
        f"{attention!r} attention does not support a static cache": attention not in ATTENTION,
        f"{type(model).__name__} supports no static cache": not supported,
        "the cache is offloaded": cache.offloading,
        f"the cache is a {type(cache).__name__}": type(cache) is not DynamicCache,
        f"the cache has layers of {', '.join(sorted(layers))}": bool(layers),
        f"the model is passed {', '.join(sorted(unknown))}": bool(unknown),
        "adapters are loaded, which may change without notice": hasattr(model, "peft_config"),
        "the model is in training mode": model.training,
        "autocast is enabled, whose copies of weights move": torch.is_autocast_enabled(model.device.type),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
