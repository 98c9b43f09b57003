"""Random models, for what depends on a model's shape and not on what it has learned."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tide_hf import TIDERouters


def random_llama(num_layers: int, hidden_size: int, vocab_size: int, *, seed: int = 0, max_length: int = 8192) -> Any:
    """A Llama with random weights that never ends an answer.

    Args:
        num_layers: Decoder layers.
        hidden_size: Width; a multiple of 32.
        vocab_size: Tokens.
        seed: Of the weights.
        max_length: Most positions.
    """
    torch.manual_seed(seed)
    heads = max(1, hidden_size // 64)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab_size,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    model.config._name_or_path = f"random Llama, {num_layers} layers"
    return model


def random_routers(model: Any, exit_layers: list[int]) -> TIDERouters:
    """Routers for `model` that nothing has calibrated."""
    return TIDERouters.for_model(model, exit_layers=exit_layers)
