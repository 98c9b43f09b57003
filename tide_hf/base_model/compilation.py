"""Models under `torch.compile`, which always run every layer."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from ..common.errors import UnsupportedModelError, describe
from .structure import DecoderStructure

logger = logging.getLogger(__name__)


def check_uncompiled(model: Any, structure: DecoderStructure) -> None:
    """Refuse a model in which `torch.compile` wraps decoder layers or MLPs.

    Args:
        model: The attached model.
        structure: Its structure.

    Raises:
        UnsupportedModelError: The model, the decoder inside it, a layer or a layer's MLP is compiled as a whole.
    """
    for name, module in model.named_modules():
        if not _is_compiled(module):
            continue
        inside = set(module.modules())
        if any(part in inside for part in (*structure.layers, *structure.mlps)):
            where = f"model.{name}" if name else "the model"
            raise UnsupportedModelError(
                describe(
                    "what torch.compile has compiled runs all its layers, so TIDE cannot decode with it",
                    got=f"{where}, a {type(module).__name__}, compiled",
                    expected="a model that is not compiled",
                    do="Leave .compile() and .forward = torch.compile(...) out, as TIDE has engine='compiled'; or do "
                    "without TIDE.",
                )
            )


def leave_uncompiled(generation_config: Any) -> None:
    """Keep `generate` from compiling passes, since gates decide at run time which layers run.

    Args:
        generation_config: Generation config of this call; changed in place.
    """
    if generation_config.compile_config is not None and not generation_config.disable_compile:
        _warn_unused_compile_config()
    generation_config.disable_compile = True


@cache
def _warn_unused_compile_config() -> None:
    logger.warning("TIDE ignores compile_config: use engine= or tide_engine= to choose what is compiled")


def _is_compiled(module: Any) -> bool:
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")
