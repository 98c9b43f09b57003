"""Inputs that a prompt alone has: images and other media, and what tells where they are in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from ..common.errors import UnsupportedOptionError, describe

MEDIA = frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
TYPES = ("token_type_ids", "mm_token_type_ids")
# Of models that take media: what else goes with these. Text behind a prompt is told its positions, and needs no more.
PLACES = frozenset({*TYPES, "image_grid_thw", "video_grid_thw", "second_per_grid_ts"})
# Of models whose layers attend to images by K/V of their own, which are as long as the images.
CROSS_ATTENDED = ("cross_attention_mask", "image_attention_mask")


def takes_media(model: Any) -> bool:
    """Whether a model has another one for text inside, and may read images and other media with it."""
    return model.config.get_text_config() is not model.config


def names_of_prompt_inputs(model: Any) -> frozenset[str]:
    """What `generate` may hand to a model that passes behind the prompt need not be given."""
    return MEDIA | PLACES if takes_media(model) else MEDIA


def says_nothing(value: Any) -> bool:
    """Whether it is an input that is not there: `None`, or outputs of media encoders where there are no media."""
    return value is None or (isinstance(value, dict) and not value)


def next_token_types(model: Any, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Take the prompt's types of tokens out of a call's inputs; return those of a token behind it, (rows or 1, 1)."""
    types = {name: model_kwargs.pop(name) for name in TYPES if model_kwargs.get(name) is not None}
    longer = model._update_model_kwargs_for_generation({}, types, False) if types else {}
    return {name: longer[name][:, -1:] for name in types}


def check_no_cross_attention(user: str, model_kwargs: dict[str, Any]) -> None:
    """Refuse images whose K/V stand in the cache in layers of their own.

    Args:
        user: What cannot do with it, for the message.
        model_kwargs: What `generate` prepared.

    Raises:
        UnsupportedOptionError: There are some.
    """
    found = next((name for name in CROSS_ATTENDED if model_kwargs.get(name) is not None), None)
    if found is not None:
        raise UnsupportedOptionError(
            describe(
                f"{user} cannot roll back or fill in K/V of images that layers attend to across",
                got=f"{found}, so a prompt with images",
                expected="a prompt of text, or a model that reads images as tokens of its prompt",
                do="Choose tide_mode='post_hoc', or detach TIDE for this call.",
            )
        )
