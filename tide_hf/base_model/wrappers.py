"""Models that users have wrapped or changed: PEFT adapters and `torch.compile`."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from ..common.errors import UnsupportedModelError, UnsupportedOptionError
from .structure import DecoderStructure

# Arguments that PEFT passes to its layers through hooks during `generate`.
ADAPTER_NAMES = "adapter_names"  # one adapter for each row of the batch
BY_POSITION = "alora_offsets"  # activated LoRA: the number of last tokens that an adapter applies to

logger = logging.getLogger(__name__)


def base_inside(model: Any) -> Any:
    """The language model that `torch.compile` or a `PeftModel` wraps; any other object is returned as it is."""
    model = getattr(model, "_orig_mod", model)
    is_wrapper = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_wrapper else model


def check_wrapper(model: Any) -> None:
    """Refuse a `PeftModel` with prompt learning, which adds virtual tokens to the prompt."""
    config = getattr(model, "active_peft_config", None)
    if config is not None and getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            "this kind of adapter cannot be attached to",
            got=f"{type(config).__name__}, whose virtual tokens are added at every step of generate",
            expected="an adapter inside the layers, such as LoRA, or none",
            do="Use the model without TIDE, or train such an adapter instead.",
        )


def check_adapters(model: Any, structure: DecoderStructure) -> None:
    """Refuse a `generate` call with adapters for which multi-token passes differ from token-by-token decoding."""
    owner = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", model)
    problem = None
    if owner is not model:
        problem = f"virtual tokens of {type(owner).__name__}"
    elif BY_POSITION in _hooked_arguments(model, structure):
        problem = f"an activated LoRA ({BY_POSITION})"
    if problem is not None:
        raise UnsupportedOptionError(
            "TIDE cannot decode with this adapter",
            got=problem,
            expected="an adapter that treats every token alike, such as LoRA, or none",
            do="Detach TIDE for plain decoding.",
        )


def has_adapters_by_row(model: Any, structure: DecoderStructure) -> bool:
    """Whether this call of `generate` uses one adapter per row, so that rows must not be reordered."""
    return ADAPTER_NAMES in _hooked_arguments(model, structure)


def _hooked_arguments(model: Any, structure: DecoderStructure) -> set[str]:
    if not hasattr(model, "peft_config"):
        return set()
    modules = (module for layer in structure.layers for module in layer.modules())
    hooks = (hook for module in modules for hook in module._forward_pre_hooks.values())
    return {name for hook in hooks for name in getattr(hook, "keywords", {})}


def check_uncompiled(model: Any, structure: DecoderStructure) -> None:
    """Refuse a model in which `torch.compile` wraps decoder layers, since compiled layers cannot be skipped."""
    for name, module in model.named_modules():
        if not _is_compiled(module):
            continue
        inside = set(module.modules())
        if any(layer in inside for layer in structure.layers):
            where = f"model.{name}" if name else "the model"
            raise UnsupportedModelError(
                "what torch.compile has compiled runs all its layers, so TIDE cannot decode with it",
                got=f"{where}, a {type(module).__name__}, compiled",
                expected="a model that is not compiled",
                do="Leave .compile() and .forward = torch.compile(...) out, as TIDE has engine='compiled'.",
            )


def _is_compiled(module: Any) -> bool:
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def leave_uncompiled(generation_config: Any) -> None:
    """Keep `generate` from compiling passes, since gates decide at run time which layers run.

    `generation_config`, the config of the call, is changed in place.
    """
    if generation_config.compile_config is not None and not generation_config.disable_compile:
        _warn_unused_compile_config()
    generation_config.disable_compile = True


@cache
def _warn_unused_compile_config() -> None:
    logger.warning("TIDE ignores compile_config: use engine= or tide_engine= to choose what is compiled")
