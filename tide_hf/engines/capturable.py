"""Decide whether a call can run on steps of fixed shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..base_model.inputs import is_absent, names_of_prompt_inputs
from ..base_model.structure import CACHE, has_windows
from ..speculation.ranks import ranks_of
from .steps.step_store import StepStore

KNOWN_ARGUMENTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_position"}
ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class CallFacts:
    """The properties of a call that decide whether it can run on steps of fixed shape.

    Attributes:
        rows: Number of sequences.
        devices: Devices of the model's weights.
        attention: The attention implementation.
        cache: Class name of the cache.
        layer_kinds: Class names of the cache's layers.
        arguments: Names of model inputs that decode passes receive.
        has_windows: Whether some layers have a sliding window or chunked attention.
        is_sharded: Whether several processes share the model (tensor parallelism).
        has_adapters: Whether PEFT adapters are loaded.
        training: Whether the model is in training mode.
        autocast: Whether autocast is enabled.
        refused: Why an earlier call could not capture steps, if it could not.
    """

    rows: int
    devices: frozenset[str]
    attention: str
    cache: str
    layer_kinds: frozenset[str]
    arguments: frozenset[str]
    has_windows: bool
    is_sharded: bool
    has_adapters: bool
    training: bool
    autocast: bool
    refused: str | None = None


def why_not_captured(facts: CallFacts) -> str | None:
    """The reason why a call has to run eagerly, or `None`."""
    kinds = facts.layer_kinds - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    reasons = {
        f"the model is spread over {', '.join(sorted(facts.devices))}": len(facts.devices) != 1,
        "processes share the model, and measure costs together": facts.is_sharded,
        f"{facts.attention!r} attention does not support a static cache": facts.attention not in ATTENTION,
        f"the cache is a {facts.cache}": facts.cache != DynamicCache.__name__,
        f"the cache has layers of {', '.join(sorted(kinds))}": bool(kinds),
        f"the model is passed {', '.join(sorted(facts.arguments - KNOWN_ARGUMENTS))}": not facts.arguments
        <= KNOWN_ARGUMENTS,
        "a batch leaves holes in the cache, which sliding windows would count": facts.rows > 1 and facts.has_windows,
        "adapters are loaded, which may change without notice": facts.has_adapters,
        "the model is in training mode": facts.training,
        "autocast is enabled, whose copies of weights move": facts.autocast,
        str(facts.refused): facts.refused is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def facts_of(model: Any, steps: StepStore, rows: int, model_kwargs: dict[str, Any]) -> CallFacts:
    """Collect the facts of one call of an attached model."""
    cache = model_kwargs[CACHE]
    config = model.config.get_text_config()
    return CallFacts(
        rows=rows,
        devices=frozenset(map(str, {parameter.device for parameter in model.parameters()}))
        | {str(device) for device in getattr(model, "hf_device_map", {}).values() if device in ("cpu", "disk")},
        attention=config._attn_implementation,
        cache="an offloaded cache" if cache.offloading else type(cache).__name__,
        layer_kinds=frozenset(type(layer).__name__ for layer in cache.layers),
        arguments=frozenset(name for name, value in model_kwargs.items() if not is_absent(value))
        - names_of_prompt_inputs(model),
        has_windows=has_windows(config),
        is_sharded=ranks_of(model).many,
        has_adapters=hasattr(model, "peft_config"),
        training=model.training,
        autocast=torch.is_autocast_enabled(model.device.type),
        refused=steps.refused,
    )


def why_not_after_prefill(cache: Cache, positions: Tensor | None, prepared: Tensor | None) -> str | None:
    """The reason, known only after prefill, why a call has to continue eagerly, or `None`.

    Args:
        cache: The filled cache.
        positions: Positions of the next tokens, if the model takes any.
        prepared: The same as `prepare_inputs_for_generation` returns them.
    """
    if not all(getattr(layer, "is_initialized", True) for layer in cache.layers):
        return "some cache layers are empty"
    if positions is not None and prepared is None:
        return "the model computes positions by itself"
    return None
