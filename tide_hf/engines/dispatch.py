"""From the engine that a call asks for to the one that runs it."""

from __future__ import annotations

import torch

from ..choices import EAGER
from ..decoding.attachment import Attachment


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
