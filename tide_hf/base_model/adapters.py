"""PEFT adapters: the model inside them, and which of them verify passes support."""

from __future__ import annotations

from typing import Any

from ..common.errors import UnsupportedModelError, UnsupportedOptionError, describe
from .structure import DecoderStructure

# Arguments that PEFT passes to its layers through hooks during `generate`.
BY_ROW = "adapter_names"  # one adapter for each row of the batch
BY_POSITION = "alora_offsets"  # activated LoRA: the number of last tokens that an adapter applies to


def base_inside(model: Any) -> Any:
    """The language model that `torch.compile` or a `PeftModel` wraps; any other object is returned as it is."""
    model = getattr(model, "_orig_mod", model)
    is_wrapper = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_wrapper else model


def check_wrapper(model: Any) -> None:
    """Refuse a `PeftModel` with prompt learning, whose adapter is not in the layers.

    Args:
        model: The caller's model, wrapped or not.

    Raises:
        UnsupportedModelError: The adapter prepends virtual tokens to the prompt.
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
    """Refuse adapters for which a multi-token pass differs from token-by-token decoding.

    Args:
        model: The attached model, while `generate` runs.
        structure: Its structure.

    Raises:
        UnsupportedOptionError: Such an adapter is active.
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
    """Whether this call of `generate` uses one adapter per row, so that rows must not be reordered."""
    return BY_ROW in _hooked_arguments(model, structure)


def _hooked_arguments(model: Any, structure: DecoderStructure) -> set[str]:
    if not hasattr(model, "peft_config"):
        return set()
    modules = (module for layer in structure.layers for module in layer.modules())
    hooks = (hook for module in modules for hook in module._forward_pre_hooks.values())
    return {name for hook in hooks for name in getattr(hook, "keywords", {})}
