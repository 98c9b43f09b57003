"""Routers with a random draft head, and the heads that the `speculators` package wrote, with a base model for them."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tide_hf.base_model.structure import find_structure
from tide_hf.routers.routers import TIDERouters

REFERENCE = Path(__file__).parents[1] / "routers" / "eagle3_reference"
HEADS = ("llama", "qwen3", "plain")
SHAPE = {
    **{"hidden_size": 0, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"draft_vocab_size": 0, "tap_layers": [], "target_hidden_size": 0, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 256},
    **dict.fromkeys(("attention_bias", "mlp_bias", "qk_norm", "norm_before_residual", "norm_before_fc"), False),
    **dict.fromkeys(("fc_norm", "norm_output", "has_embedding"), False),
}


def base_model(**changes):
    """A Llama that the heads of `REFERENCE` fit."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 32, "num_hidden_layers": 4, **shape, **changes})).eval()


def draft_head_for(model, seed=0, **changes):
    """Routers with exit layer 2 and a random draft head, which taps the first, a middle and the last state."""
    structure = find_structure(model)
    size, layers = structure.hidden_size, structure.num_layers
    shape = SHAPE | {"hidden_size": size, "target_hidden_size": size, "draft_vocab_size": structure.vocab_size}
    shape |= {"tap_layers": [0, layers // 2, layers]} | changes
    torch.manual_seed(seed)
    routers = TIDERouters.for_model(model, exit_layers=[2], draft_head=shape)
    for parameter in routers.draft_head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return routers
