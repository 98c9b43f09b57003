"""The format of the `speculators` package, in which vLLM loads draft heads: config, tensors, and how vLLM is called."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .config import TIDEConfig

LAYER_FIELDS: tuple[str, ...] = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
LAYER_FIELDS += ("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "max_position_embeddings")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
NUM_DRAFT_TOKENS = 3  # tokens per draft that is suggested to vLLM
PREFIX = "draft_head."  # of the head's tensors among those of routers
CONFIDENCE = f"{PREFIX}confidence"  # which the format has no place for


def speculators_config(config: TIDEConfig, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> dict[str, Any]:
    """The content of a `config.json` in the format, for the draft head of the routers that `config` belongs to."""
    head: Any = config.draft_head
    layer = {name: head[name] for name in LAYER_FIELDS} | {
        "model_type": "qwen3" if head["qk_norm"] else "llama",
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "rope_parameters": head["rope_parameters"],
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(head["tap_layers"]),  # vLLM expects three where it is not told
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head["draft_vocab_size"],
        "target_hidden_size": head["target_hidden_size"],
        TAPS: list(head["tap_layers"]),
        **{flag: head[flag] for flag in FLAGS},
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": {"name_or_path": config.base_model_name_or_path, "architectures": []},
        },
    }


def to_speculators(tensors: Mapping[str, Tensor], vocab_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the tensors of routers into those of the draft head, named as in the format, and all others.

    A vocabulary is mapped by `d2t`, and by `t2d` (vocab_size,), true at the tokens of the draft vocabulary. vLLM takes
    neither where the draft vocabulary is the whole one.
    """
    others = {name: one for name, one in tensors.items() if name == CONFIDENCE or not name.startswith(PREFIX)}
    head = {name.removeprefix(PREFIX): one for name, one in tensors.items() if name not in others}
    d2t = head["d2t"]
    if len(d2t) == vocab_size and not d2t.any():
        del head["d2t"]
    else:
        head["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
        head["t2d"][torch.arange(len(d2t)) + d2t] = True
    return head, others


def from_speculators(head: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of routers that `to_speculators` has split."""
    tensors = {f"{PREFIX}{name}": one for name, one in head.items() if name != "t2d"}
    if "d2t" not in head and "lm_head.weight" in head:
        tensors[f"{PREFIX}d2t"] = no_offsets(head["lm_head.weight"].shape[:1])
    return {**tensors, **others}


def no_offsets(shape: Sequence[int]) -> Tensor:
    """The `d2t` of a draft vocabulary that is the whole one; it takes no memory, as its shape is not checked yet."""
    return torch.zeros((), dtype=torch.long).expand(shape)


def vllm_command(base: str, revision: str | None, name: str) -> str:
    """The shell command by which vLLM serves a base model with the draft head in the folder or repository `name`."""
    options = {"model": name, "method": "eagle3", "num_speculative_tokens": NUM_DRAFT_TOKENS}
    words = ["vllm", "serve", base, *(["--revision", revision] if revision else [])]
    return shlex.join([*words, "--speculative-config", json.dumps(options)])
