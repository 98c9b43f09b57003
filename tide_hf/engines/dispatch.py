"""From the engine that a call asks for to the one that runs it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..common.choices import EAGER
from ..speculation.attachment import Attachment
from ..speculation.engine import Engine
from .capturable import facts_of, why_not_captured
from .eager import EagerEngine
from .static import StaticEngine

logger = logging.getLogger(__name__)


def engine_of(attachment: Attachment, engine: str, mode: str, device: torch.device) -> str:
    """The engine that runs a call.

    Args:
        attachment: What TIDE added to the model.
        engine: What the call asks for.
        mode: Its mode.
        device: That of its tokens.

    Raises:
        UnsupportedOptionError: CUDA graphs are asked for, and the model is not on a GPU.
    """
    if engine != "cuda_graph":
        return engine
    attachment.captured_steps.check_device(device)
    if mode == "self_speculative":
        return engine
    attachment.captured_steps.log_eager(f"tide_mode={mode!r} decides layer by layer")
    return EAGER


def engine_for(
    model: Any,
    attachment: Attachment,
    name: str,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> Engine:
    """The engine of one call: on steps of fixed shape where `name` says so and the call can, else the eager one.

    Args:
        model: The attached model.
        attachment: What TIDE added to it.
        name: Of the engine that the call asks for.
        input_ids: (rows, prompt length).
        generation_config: Of this call.
        model_kwargs: What `generate` prepared.
    """
    call = (model, attachment, input_ids, generation_config, model_kwargs)
    if name == "cuda_graph" or (name == "compiled" and input_ids.device.type == "cpu"):
        steps = attachment.steps_of(name)
        reason = why_not_captured(facts_of(model, steps, input_ids.shape[0], model_kwargs))
        if reason is None:
            return StaticEngine(EagerEngine(*call, name=name, fills_block_late=False), steps)
        if name == "compiled":  # each layer by itself, whatever the cache
            logger.info("engine='compiled' runs layer by layer: %s", reason)
        else:
            attachment.captured_steps.log_eager(reason)
            name = EAGER
    return EagerEngine(*call, name=name)
