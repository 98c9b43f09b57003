"""Write the draft heads, and what they draft, that `routers/test_eagle3` compares ours with.

Run in an environment with `speculators` 0.9.0 and this repository: `python tests/support/make_eagle3_reference.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

FOLDER = Path(__file__).parents[1] / "routers" / "eagle3_reference"
VOCABULARY, DRAFT_VOCABULARY, SIZE, STEPS, LENGTH = 32, 24, 16, 4, 9
HEADS = {
    "llama": (LlamaConfig, {"norm_before_residual": True, "norm_output": True}),
    "qwen3": (Qwen3Config, {"fc_norm": True}),
    "plain": (LlamaConfig, {"norm_before_fc": True}),
}


def make(name: str) -> None:
    """Write a random head in the speculators format, its inputs, and its logits at each step."""
    torch.manual_seed(len(name))
    kind, flags = HEADS[name]
    shape = {"hidden_size": SIZE, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    layer = kind(vocab_size=VOCABULARY, head_dim=8, num_hidden_layers=1, **shape)
    layer._attn_implementation = "sdpa"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    method = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCABULARY,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
        ),
        **flags,
    )
    head = Eagle3DraftModel(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter.data, std=0.5)
    tokens = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[tokens] = True
    head.load_vocab_mappings(t2d, tokens - torch.arange(DRAFT_VOCABULARY))
    head.save_pretrained(FOLDER / name)
    (FOLDER / name / "config.py").unlink()  # a copy of code of the package, which transformers adds
    ids, tapped = torch.randint(VOCABULARY, (1, LENGTH)), torch.randn(1, LENGTH, 3 * SIZE)
    logits: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda _, __, output: logits.append(output.detach()))
    with torch.no_grad():
        head(tapped[:, :-1], ids[:, 1:], torch.zeros(1, LENGTH - 1, dtype=torch.long), ttt_steps=STEPS)
    # Row k of `logits`: those of step k, for drafts that start at each token but the first.
    save_file({"ids": ids, "tapped": tapped, "logits": torch.cat(logits)}, FOLDER / name / "reference.safetensors")


if __name__ == "__main__":
    for one in HEADS:
        make(one)
