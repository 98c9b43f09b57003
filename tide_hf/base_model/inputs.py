"""Model inputs that only prefill needs: images and other media, and their positions in the prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from ..common.errors import UnsupportedOptionError

MEDIA = frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
TYPES = ("token_type_ids", "mm_token_type_ids")
# Further inputs of multimodal models: token types of the prompt, and the size and timing of its images and videos.
POSITIONS = frozenset({*TYPES, "image_grid_thw", "video_grid_thw", "second_per_grid_ts"})
# Masks for models that read images by cross-attention: the K/V of cross-attention layers come from images.
CROSS_ATTENDED = ("cross_attention_mask", "image_attention_mask")
ROUTER_LOSS = "output_router_logits"  # has a mixture of experts compute the loss of its routers


def takes_media(model: Any) -> bool:
    """Whether the model is multimodal: a wrapper around a text model."""
    return model.config.get_text_config() is not model.config


def names_of_prompt_inputs(model: Any) -> frozenset[str]:
    """Names of model inputs that only prefill needs."""
    return MEDIA | POSITIONS if takes_media(model) else MEDIA


def is_absent(value: Any) -> bool:
    """Whether an input is absent: `None`, or the empty encoder output of a prompt without media."""
    return value is None or (isinstance(value, dict) and not value)


def without_router_loss(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Change `inputs` so that a mixture of experts computes no loss of its routers; return them.

    Training leaves a config that asks for the loss, and for the loss a mask may not cover cached tokens.
    """
    if inputs.get(ROUTER_LOSS) or getattr(model.config, ROUTER_LOSS, False):
        inputs[ROUTER_LOSS] = False
    return inputs


def next_token_types(model: Any, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Remove the prompt's token types from `model_kwargs`; return those of generated tokens, (rows or 1, 1) each."""
    types = {name: model_kwargs.pop(name) for name in TYPES if model_kwargs.get(name) is not None}
    longer = model._update_model_kwargs_for_generation({}, types, False) if types else {}
    return {name: longer[name][:, -1:] for name in types}


def check_no_cross_attention(user: str, model_kwargs: dict[str, Any]) -> None:
    """Refuse images that the model reads by cross-attention. The error names the feature `user`."""
    found = next((name for name in CROSS_ATTENDED if model_kwargs.get(name) is not None), None)
    if found is not None:
        raise UnsupportedOptionError(
            f"{user} cannot roll back or fill the K/V of cross-attention layers",
            got=f"{found}, so a prompt with images",
            expected="a prompt of text, or a model that reads images as tokens of its prompt",
            do="Choose tide_mode='post_hoc', or detach TIDE for this call.",
        )
