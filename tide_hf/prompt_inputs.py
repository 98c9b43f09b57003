"""Inputs that a prompt alone has: images and other media, and what tells where they are in it."""

from __future__ import annotations

from typing import Any

from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

MEDIA = frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
# Of models that take media: what else goes with these. Text behind a prompt is told its positions, and needs no more.
PLACES = frozenset(
    {"token_type_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes"}
)


def takes_media(model: Any) -> bool:
    """Whether a model has another one for text inside, and may read images and other media with it."""
    return model.config.get_text_config() is not model.config


def names_of_prompt_inputs(model: Any) -> frozenset[str]:
    """What `generate` may hand to a model that passes behind the prompt need not be given."""
    return MEDIA | PLACES if takes_media(model) else MEDIA


def says_nothing(value: Any) -> bool:
    """Whether it is an input that is not there: `None`, or outputs of media encoders where there are no media."""
    return value is None or (isinstance(value, dict) and not value)
