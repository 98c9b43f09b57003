"""Whether a call can run on steps of fixed shape, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..base_model.inputs import names_of_prompt_inputs, says_nothing
from ..base_model.structure import CACHE, has_windows
from ..speculation.ranks import ranks_of
from .steps.step_store import StepStore

KNOWN_ARGUMENTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_position"}
ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class CallFacts:
    """What decides whether a call can run on steps of fixed shape.

    Attributes:
        rows: Sequences.
        devices: Of the model's weights.
        attention: The implementation.
        cache: Name of the cache's class.
        layer_kinds: Names of its layers' classes.
        arguments: What `generate` hands to the model for more than the prompt.
        has_windows: Whether some layers attend to a part of the context.
        is_sharded: Whether processes share the model.
        has_adapters: Whether there are adapters in the layers.
        training: Whether the model is in training mode.
        autocast: Whether operations choose dtypes by themselves.
        refused: What an earlier call found.
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
    """Why a call runs eagerly instead, or `None`."""
    kinds = facts.layer_kinds - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    reasons = {
        f"the model is spread over {', '.join(sorted(facts.devices))}": len(facts.devices) != 1,
        "processes share the model, and measure costs together": facts.is_sharded,
        f"attention by {facts.attention!r} takes no fixed buffers": facts.attention not in ATTENTION,
        f"the cache is a {facts.cache}": facts.cache != DynamicCache.__name__,
        f"a cache of {', '.join(sorted(kinds))}": bool(kinds),
        f"the model is handed {', '.join(sorted(facts.arguments - KNOWN_ARGUMENTS))}": not facts.arguments
        <= KNOWN_ARGUMENTS,
        "rows with holes, and layers with a window, which would count them": facts.rows > 1 and facts.has_windows,
        "adapters may change without notice": facts.has_adapters,
        "the model is in training mode": facts.training,
        "under autocast copies of weights do not stay where they are": facts.autocast,
        str(facts.refused): facts.refused is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def facts_of(model: Any, steps: StepStore, rows: int, model_kwargs: dict[str, Any]) -> CallFacts:
    """The facts of one call of an attached model."""
    cache = model_kwargs[CACHE]
    config = model.config.get_text_config()
    return CallFacts(
        rows=rows,
        devices=frozenset(map(str, {parameter.device for parameter in model.parameters()}))
        | {str(device) for device in getattr(model, "hf_device_map", {}).values() if device in ("cpu", "disk")},
        attention=config._attn_implementation,
        cache="an offloaded cache" if cache.offloading else type(cache).__name__,
        layer_kinds=frozenset(type(layer).__name__ for layer in cache.layers),
        arguments=frozenset(name for name, value in model_kwargs.items() if not says_nothing(value))
        - names_of_prompt_inputs(model),
        has_windows=has_windows(config),
        is_sharded=ranks_of(model).many,
        has_adapters=hasattr(model, "peft_config"),
        training=model.training,
        autocast=torch.is_autocast_enabled(model.device.type),
        refused=steps.refused,
    )


def why_not_behind_prompt(cache: Cache, positions: Tensor | None, prepared: Tensor | None) -> str | None:
    """Why a call that looked as if it could goes on eagerly once its prompt is read, or `None`.

    Args:
        cache: The filled cache.
        positions: Those of the next tokens, if the model is told.
        prepared: The same as the model prepares them.
    """
    if not all(getattr(layer, "is_initialized", True) for layer in cache.layers):
        return "some layers keep nothing of it"
    if positions is not None and prepared is None:
        return "the model finds positions by itself"
    return None
