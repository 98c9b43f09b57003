"""Adapters of PEFT: the model inside them, and what a verify pass has to know about them."""

from __future__ import annotations

from typing import Any

from ..common.errors import UnsupportedModelError, UnsupportedOptionError, describe
from .structure import DecoderStructure

# Arguments that PEFT hands to its layers by hooks while `generate` runs.
BY_ROW = "adapter_names"  # one adapter for each row of the batch
BY_POSITION = "alora_offsets"  # activated LoRA: how many tokens, from the end, an adapter works on


def base_inside(model: Any) -> Any:
    """The language model that `torch.compile` or a `PeftModel` wraps; any other object is returned as it is."""
    model = getattr(model, "_orig_mod", model)
    is_wrapper = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_wrapper else model


def check_wrapper(model: Any) -> None:
    """Refuse a `PeftModel` whose adapter is no part of the layers.

    Args:
        model: What the caller passed, wrapped or not.

    Raises:
        UnsupportedModelError: It puts virtual tokens in front of the prompt.
    """
    config = getattr(model, "active_peft_config", None)
    if config is not None and getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            describe(
                "this kind of adapter cannot be attached to",
                got=f"{type(config).__name__}, whose virtual tokens are added at every step of generate",
                expected="an adapter inside the layers, such as LoRA, or none",
                do="Use the model without TIDE, or train such an adapter instead.",
            )
        )


def check_adapters(model: Any, structure: DecoderStructure) -> None:
    """Refuse adapters that treat a pass over several tokens otherwise than several passes over one.

    Args:
        model: The attached model, while `generate` runs.
        structure: Its structure.

    Raises:
        UnsupportedOptionError: There is such an adapter.
    """
    owner = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", model)
    problems = {
        f"virtual tokens of {type(owner).__name__}": owner is not model,
        f"an activated LoRA ({BY_POSITION})": BY_POSITION in _hooked_arguments(model, structure),
    }
    for got, is_problem in problems.items():
        if is_problem:
            raise UnsupportedOptionError(
                describe(
                    "TIDE cannot decode with this adapter",
                    got=got,
                    expected="an adapter that treats every token alike, such as LoRA, or none",
                    do="Detach TIDE for plain decoding.",
                )
            )


def has_adapters_by_row(model: Any, structure: DecoderStructure) -> bool:
    """Whether this call of `generate` gave each row an adapter of its own, so that rows must keep their places."""
    return BY_ROW in _hooked_arguments(model, structure)


def _hooked_arguments(model: Any, structure: DecoderStructure) -> set[str]:
    if not hasattr(model, "peft_config"):
        return set()
    modules = (module for layer in structure.layers for module in layer.modules())
    hooks = (hook for module in modules for hook in module._forward_pre_hooks.values())
    return {name for hook in hooks for name in getattr(hook, "keywords", {})}
