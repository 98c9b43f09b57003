"""Tiny random models that take images as well, and prompts with images."""

from __future__ import annotations

from typing import Any

import torch
from families import _SECTIONED, FAMILIES, IMAGE_TOKEN, VOCAB, random_model
from transformers import PreTrainedModel

from tide_hf.base_model.inputs import TYPES

LENGTH = 24  # tokens of a prompt
SIZE = 16  # of an image, in pixels
MARKS = (91, 92)  # tokens before and after an image

_TEXT = FAMILIES["llama"]
_VISION = FAMILIES["gemma3"]["vision_config"]
_QWEN = FAMILIES["qwen2_5_vl"]
_QWEN_VISION = {name: value for name, value in _QWEN["vision_config"].items() if name != "fullatt_block_indexes"}
_IMAGE = {"image_token_id": IMAGE_TOKEN}

SEEING: dict[str, dict] = {
    "gemma3": FAMILIES["gemma3"],
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": {
        **_QWEN,
        "text_config": {**_QWEN["text_config"], "model_type": "qwen2_vl_text"},
        "vision_config": {**_QWEN_VISION, "embed_dim": 16, "hidden_size": 32},
    },
    "qwen3_vl": {
        **_QWEN,
        "text_config": {**_TEXT, "model_type": "qwen3_vl_text", "rope_parameters": _SECTIONED},
        "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
    "glm4v": {
        "text_config": {**_TEXT, "model_type": "glm4v_text", "rope_parameters": _SECTIONED},
        "vision_config": {**_QWEN_VISION, "image_size": SIZE},
        **{**_IMAGE, "image_start_token_id": MARKS[0], "image_end_token_id": MARKS[1]},
        **{"video_token_id": 93, "video_start_token_id": 94, "video_end_token_id": 95},
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        **{**_IMAGE, "image_seq_length": 16, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8},
        **{**_IMAGE, "spatial_merge_size": 2, "vision_feature_layer": -1},
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VISION, "model_type": "internvl_vision", "image_size": [SIZE] * 2, "patch_size": [4, 4]},
        **{**_IMAGE, "downsample_ratio": 0.5, "image_seq_length": 4, "vision_feature_layer": -1},
    },
    "paligemma": {
        "text_config": {**FAMILIES["gemma2"], "model_type": "gemma2", "final_logit_softcapping": None},
        "vision_config": {**_VISION, "projection_dim": 32},
        **{**_IMAGE, "projection_dim": 32, "hidden_size": 32},
    },
    "cohere2_vision": {
        "text_config": {**FAMILIES["cohere2"], "model_type": "cohere2"},
        "vision_config": _VISION,
        **{**_IMAGE, "downsample_factor": 2, "alignment_intermediate_size": 32},
    },
    "smolvlm": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {name: value for name, value in _VISION.items() if name != "model_type"},
        **{**_IMAGE, "scale_factor": 2, "pad_token_id": 0},
    },
}
GRIDDED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")  # inputs tell the patch grid and the tokens of an image
TYPED = ("gemma3", "paligemma")  # inputs tell which tokens are an image


def seeing_model(family: str, **overrides: object) -> PreTrainedModel:
    """A tiny random model that takes images."""
    model = random_model(family, SEEING[family], **overrides)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # gemma3's image projection is zero at first
            torch.nn.init.normal_(parameter)
    return model


def image_prompts(family: str, rows: int = 1, seed: int = 0) -> dict[str, Any]:
    """Left-padded prompts with one image each, as a processor returns them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB - 10, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        ids[row, : 2 * row], mask[row, : 2 * row] = 0, 0
    tokens = 16 if family in ("llava", "paligemma") else 4
    image = slice(LENGTH - tokens - 2, LENGTH - 2)
    ids[:, image] = IMAGE_TOKEN
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if family in GRIDDED:
        ids[:, image.start - 1], ids[:, image.stop] = MARKS
        inputs["pixel_values"] = torch.randn(rows * 16, 3 * 16, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        return inputs
    inputs["pixel_values"] = torch.randn(rows, 3, SIZE, SIZE, generator=generator)
    if family == "smolvlm":
        inputs["pixel_values"] = inputs["pixel_values"][:, None]
    if family == "mistral3":
        inputs["image_sizes"] = torch.tensor([[SIZE, SIZE]] * rows)
    if family in TYPED:
        inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return inputs


def long_image_prompts(family: str, rows: int, more: int) -> dict[str, Any]:
    """The prompts of `image_prompts`, followed by `more` tokens of text."""
    inputs = image_prompts(family, rows)
    text = torch.randint(3, VOCAB - 10, (rows, more), generator=torch.Generator().manual_seed(1))
    behind = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    behind |= {name: torch.zeros_like(text) for name in TYPES if name in inputs}
    return inputs | {name: torch.cat([inputs[name], values], dim=1) for name, values in behind.items()}
