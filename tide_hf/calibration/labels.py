"""Which positions may leave early: three rules, each comparing an exit layer with the full model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..base_model.unembed import Unembed
from ..common.choices import LABELS, check_choice
from .hidden_states import SLICE_ELEMENTS, top_tokens

CONVERGENCE_THRESHOLD = 0.98  # the published one
# In nats. By Pinsker's inequality the two distributions then differ by at most sqrt(0.1 / 2) = 0.22 in total variation,
# so that rejection sampling keeps at least 78% of the tokens that such an exit drafts.
KL_THRESHOLD = 0.1
ARRAYS_PER_LOGIT = 4  # logits and log-probabilities, of the exit head and of the full model


@torch.no_grad()
def router_labels(
    kind: str, unembed: Unembed, head: nn.Module, hidden_states: Tensor, final_states: Tensor, top_tokens: Tensor
) -> Tensor:
    """Tell where a router should let a position leave.

    Args:
        kind: `"agreement"`: the exit head's top token is the full model's. `"cosine"`: the exit layer's state has a
            cosine similarity above `CONVERGENCE_THRESHOLD` with the final one (the published rule; the head plays no
            part). `"kl"`: the divergence KL(full model || exit head) of the next token's distributions is below
            `KL_THRESHOLD`.
        unembed: The base model's unembedding.
        head: The exit head of the layer that the states come from.
        hidden_states: (N, hidden_size) of that layer, before the final norm, in the model's dtype.
        final_states: (N, hidden_size) of the last layer, before the final norm, in the model's dtype.
        top_tokens: (N,) the full model's top tokens.

    Returns:
        (N,) bool, on the device of `top_tokens`.

    Raises:
        ConfigurationError: There is no such kind.
    """
    check_choice("labels", kind, LABELS)
    if kind == "agreement":
        return agreement_labels(unembed, head, hidden_states, top_tokens)
    if kind == "cosine":
        return (cosine_similarity(hidden_states, final_states) > CONVERGENCE_THRESHOLD).to(top_tokens.device)
    return (kl_divergence(unembed, head, hidden_states, final_states) < KL_THRESHOLD).to(top_tokens.device)


@torch.no_grad()
def agreement_labels(unembed: Unembed, head: nn.Module, hidden_states: Tensor, full_model: Tensor) -> Tensor:
    """Tell where `head` and the full model choose the same token.

    Args:
        unembed: The base model's unembedding.
        head: The exit head of the layer that the states come from.
        hidden_states: (N, hidden_size) before the final norm, in the model's dtype.
        full_model: (N,) the full model's top tokens.

    Returns:
        (N,) bool, on the device of `full_model`.
    """
    return top_tokens(unembed, head(hidden_states)).to(full_model.device) == full_model


def cosine_similarity(hidden_states: Tensor, final_states: Tensor) -> Tensor:
    """Compare states, both (N, hidden_size) and before the final norm -> (N,) float32; some positions at a time."""
    rows = max(1, SLICE_ELEMENTS // hidden_states.shape[-1])
    parts = [
        nn.functional.cosine_similarity(early.float(), final.to(early.device).float(), dim=-1)
        for early, final in zip(hidden_states.split(rows), final_states.split(rows), strict=True)
    ]
    return torch.cat(parts)


@torch.no_grad()
def kl_divergence(unembed: Unembed, head: nn.Module, hidden_states: Tensor, final_states: Tensor) -> Tensor:
    """KL(full model || exit head) of the next token's distributions, some positions at a time.

    Args:
        unembed: The base model's unembedding.
        head: The exit head.
        hidden_states: (N, hidden_size) of the exit layer, before the final norm.
        final_states: (N, hidden_size) of the last layer, before the final norm.

    Returns:
        (N,) float32, in nats.
    """
    rows = max(1, SLICE_ELEMENTS // (ARRAYS_PER_LOGIT * unembed.structure.vocab_size))
    divergences = []
    for early, final in zip(hidden_states.split(rows), final_states.split(rows), strict=True):
        exit_head = unembed(head(early)).float().log_softmax(dim=-1)
        full_model = unembed(final.to(early.device)).float().log_softmax(dim=-1)
        gaps = nn.functional.kl_div(exit_head, full_model, reduction="none", log_target=True)
        divergences.append(gaps.sum(dim=-1))
    return torch.cat(divergences)
