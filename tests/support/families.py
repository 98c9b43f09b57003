"""Tiny random models of every supported family, from configs alone, and prompts for them."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

VOCAB = 96
LAYERS = 4
_COMMON = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_HYBRID = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_WINDOW = {"sliding_window": 8, "layer_types": _HYBRID}
_TOKENS = {name: _COMMON[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}

_SEES = {  # config of a tiny vision model
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4},
}
_QWEN_SEES = {
    **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_heads": 2},
    **{"in_channels": 3, "patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2},
}
_SECTIONED = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
IMAGE_TOKEN = 90
_MARKS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 93, "vision_start_token_id": 91, "vision_end_token_id": 92}

FAMILIES: dict[str, dict] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": _COMMON,
    "qwen3_moe": {**_COMMON, **_MOE},
    "mistral": {**_COMMON, "sliding_window": 8},
    "mixtral": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {**_COMMON, "original_max_position_embeddings": 256},
    "olmo2": _COMMON,
    "smollm3": {**_COMMON, "use_sliding_window": False},
    "starcoder2": _COMMON,
    "deepseek_v3": {
        **_COMMON,
        "num_key_value_heads": 4,
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 24, "first_k_dense_replace": 2},
    },
    "phi": _COMMON,
    "gemma2": {**_COMMON, **_WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_COMMON, **_WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "granite": {**_COMMON, "logits_scaling": 4.0},
    "cohere2": {**_COMMON, **_WINDOW, "logit_scale": 0.25},
    "gpt_oss": {**_COMMON, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": _COMMON,
    "llama4_text": {**_COMMON, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 16},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, **_TOKENS},
    "gpt_neox": {**_COMMON, "rotary_pct": 0.5},
    "falcon": {
        **{name: value for name, value in _COMMON.items() if name != "head_dim"},
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4, **_TOKENS},
    "opt": {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 16},
    # Models for text and images, here given text alone; tests with images are in test_images.py.
    "gemma3": {
        "text_config": {**_COMMON, **_WINDOW, "model_type": "gemma3_text", "query_pre_attn_scalar": 8},
        "vision_config": {**_SEES, "model_type": "siglip_vision_model"},
        **{"mm_tokens_per_image": 4, "image_token_id": IMAGE_TOKEN, "boi_token_id": 91, "eoi_token_id": 92},
    },
    "qwen2_5_vl": {
        "text_config": {**_COMMON, "model_type": "qwen2_5_vl_text", "rope_parameters": _SECTIONED},
        "vision_config": {**_QWEN_SEES, "window_size": 8, "fullatt_block_indexes": [1]},
        **_MARKS,
    },
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "state_size": 4, **_TOKENS},
    "jamba": {
        **_COMMON,
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
    },
    "bamba": {
        **_COMMON,
        **{"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4},
        "mamba_n_groups": 1,
    },
    "qwen3_next": {
        **_COMMON,
        **_MOE,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        **{
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "decoder_sparse_step": 1,
    },
}
_INDEXED = {**FAMILIES["deepseek_v3"], "index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
SPARSE: dict[str, dict] = {  # with sparse attention: a token attends to the keys that an indexer chooses
    "deepseek_v32": _INDEXED,
    "axk2": _INDEXED,
    "dots3_note_text": {**_INDEXED, "sliding_window": 8},
    "doge": {**_COMMON, "keep_window_size": 16},
    "minimax_m3_vl_text": {
        **_COMMON,
        **{"dense_intermediate_size": 48, "shared_intermediate_size": 24, "rotary_dim": 8},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["minimax_m3_sparse"] * LAYERS},
        **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 3},
    },
}
# Families that need no more than a row in `LAYOUTS` or `TUPLE_LAYERS`; one test puts each through all of it.
MORE: dict[str, dict] = {
    "biogpt": _COMMON,
    "ctrl": {**FAMILIES["gpt2"], "dff": 48},
    "dbrx": {
        **{"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 64, **_TOKENS},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt_neo": {
        **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_layers": LAYERS, "num_heads": 4},
        **{"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 16, **_TOKENS},
        "max_position_embeddings": 64,
    },
    "gpt_neox_japanese": {name: value for name, value in _COMMON.items() if name != "head_dim"},
    "lfm2": {**_COMMON, "layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "modernbert-decoder": {**_COMMON, **_WINDOW},
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 64, **_TOKENS},
    "xglm": {
        **{"vocab_size": VOCAB, "d_model": 32, "ffn_dim": 48, "num_layers": LAYERS, "attention_heads": 4, **_TOKENS},
        "max_position_embeddings": 64,
    },
}
# Families whose logits are not reproduced from their last layer, so that n-grams alone draft.
BY_NGRAMS: dict[str, dict] = {
    "bert": {**_COMMON, "is_decoder": True, "initializer_range": 0.2},
    "gemma3n_text": {
        **_COMMON,
        **_WINDOW,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "num_kv_shared_layers": 1,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "intermediate_size": [48] * LAYERS,
    },
    "git": {**FAMILIES["falcon"], "vision_config": _SEES},
    "mllama": {  # its last layer attends to images alone
        "text_config": {**_COMMON, "model_type": "mllama_text_model", "cross_attention_layers": [1, LAYERS - 1]},
        "vision_config": {**_SEES, "attention_heads": 2, "num_global_layers": 1, "intermediate_layers_indices": [0]},
        "image_token_index": IMAGE_TOKEN,
    },
}
RECURRENT = ("mamba", "jamba", "bamba", "qwen3_next")
ATTENTION = tuple(name for name in FAMILIES if name not in RECURRENT)
SDPA = tuple(name for name in ATTENTION if name not in ("gemma2", "gpt_oss", "bloom"))  # SDPA is their default


def slow_but(few, families=ATTENTION, *before):
    """Parameters for `parametrize`: the values `before`, then a family; families not in `few` are marked slow."""
    return [pytest.param(*before, one, marks=() if one in few else pytest.mark.slow) for one in families]


def tiny_model(family: str, seed: int = 0, attention: str = "eager", **overrides: object) -> PreTrainedModel:
    """A random model with untied embeddings and large weights, so that its greedy text is varied."""
    return random_model(family, FAMILIES[family], seed, attention, **overrides)


def random_model(
    family: str, settings: dict, seed: int = 0, attention: str = "eager", **overrides: object
) -> PreTrainedModel:
    """A model like `tiny_model`, but of any settings; `overrides` go to the text config."""
    torch.manual_seed(seed)
    own = {"tie_word_embeddings": False, **overrides}
    if "text_config" in settings:
        own = {"tie_word_embeddings": False, "text_config": {**settings["text_config"], **own}}
    config = AutoConfig.for_model(family, **{**settings, **own})
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    model = auto_class.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.mul_(12.0)
    return model


def longrope(limit: int) -> dict[str, object]:
    """Config of rotary embeddings that change once a text is longer than `limit`."""
    factors = {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": limit, **factors}


def prompt(rows: int = 1) -> torch.Tensor:
    """A prompt of nine tokens per row, the same in every call."""
    return torch.randint(3, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(3))


def repeating_prompt(rows: int = 1, repeats: int = 3) -> torch.Tensor:
    """A prompt that repeats six tokens, so that n-grams draft."""
    return torch.randint(3, VOCAB, (rows, 6), generator=torch.Generator().manual_seed(3)).repeat(1, repeats)
