"""From the engine that a call asks for to the one that runs it, and what the call has taught about engines."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from ..decoding.attachment import Attachment
from ..decoding.engine_choice import EAGER, key_of
from ..decoding.ranks import ranks_of
from ..decoding.speculation import SelfSpeculativeDecoder

logger = logging.getLogger(__name__)

Learn = Callable[[SelfSpeculativeDecoder], None]


def engine_of(
    model: Any, attachment: Attachment, engine: str, mode: str, input_ids: Tensor, max_length: int
) -> tuple[str, Learn]:
    """The engine that runs a call.

    Args:
        model: The attached model.
        attachment: What TIDE added to it.
        engine: What the call asks for.
        mode: Its mode.
        input_ids: (rows, prompt length).
        max_length: Most tokens of prompt and answer.

    Returns:
        The engine, and what is to be called with the decoder after a `self_speculative` call.

    Raises:
        UnsupportedOptionError: CUDA graphs are asked for, and the model is not on a GPU.
    """
    if engine == "cuda_graph":
        attachment.captured_steps.check_device(input_ids.device)
        if mode != "self_speculative":
            attachment.captured_steps.log_eager(f"tide_mode={mode!r} decides layer by layer")
            return EAGER, _nothing
    if engine != "auto":
        return engine, _nothing
    if mode != "self_speculative" or ranks_of(model).many:
        return EAGER, _nothing
    candidate = candidate_for(model)
    rows = input_ids.shape[0]
    key = call_key(model, attachment, rows, candidate)
    chooser = attachment.chooser
    chosen = chooser.choose(candidate, key, max_length - input_ids.shape[1], _is_warm(attachment, candidate))
    if chosen != EAGER and not _is_warm(attachment, chosen):
        logger.info("engine='auto' changes to %r", chosen)

    def learn(decoder: SelfSpeculativeDecoder) -> None:
        tokens = max(len(row.tokens) for row in decoder.rows)
        plain = attachment.costs_of(decoder.measured_rows, decoder.engine, decoder.widths).plain
        chooser.observe(decoder.engine, key, tokens, plain, attachment.warm_up_seconds(decoder.engine))

    return chosen, learn


def candidate_for(model: Any) -> str | None:
    """The engine with a warm-up that `auto` may change to; `None` for a model that is not on one GPU or CPU alone."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        return None
    return {"cuda": "cuda_graph", "cpu": "compiled"}.get(next(iter(devices)).type)


def call_key(model: Any, attachment: Attachment, rows: int, candidate: str | None) -> str:
    """Names all that a plain token's time depends on."""
    config, structure, device = model.config.get_text_config(), attachment.structure, model.device
    is_gpu = device.type == "cuda"
    quantised = getattr(model.config, "quantization_config", None)
    return key_of(
        model=attachment.base_class.__name__,
        sizes=[structure.num_layers, structure.hidden_size, structure.vocab_size, model.num_parameters()],
        dtype=str(model.dtype),
        quantised=str(getattr(quantised, "quant_method", None)),
        attention=config._attn_implementation,
        rows=rows,
        candidate=candidate,
        device=torch.cuda.get_device_name(device) if is_gpu else device.type,
        machine=[platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads()],
        versions=[torch.__version__, metadata.version("transformers")],
    )


def _is_warm(attachment: Attachment, engine: str | None) -> bool:
    if engine == "cuda_graph":
        return attachment.captured_steps.warm_up.num_made > 0
    has_compiled = attachment.compiled_layers.num_compiled > 0 or attachment.compiled_steps.warm_up.num_made > 0
    return engine == "compiled" and has_compiled


def _nothing(_decoder: SelfSpeculativeDecoder) -> None:
    pass
