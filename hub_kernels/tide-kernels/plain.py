"""The ops for GPUs in plain PyTorch: what tests hold to the same standard, and what benchmarks compare with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tide_hf.kernels.reference import kv_compact, normalize

__all__ = ["draft_top1", "kv_compact", "norm_route"]


def norm_route(
    hidden_states: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    *,
    eps: float,
    norm: str = "rms",
) -> Tensor:
    """Apply the final norm, the router MLP and the sigmoid.

    Shapes: hidden states (N, D) before the norm, norm weight and bias (D,), and in float32 the router's down weight
    (R, D) and bias (R,), and its up weight (1, R) and bias (1,). `eps` and `norm` are those of [`normalize`].

    Returns (N,) scores in [0, 1], float32.
    """
    state = normalize(hidden_states, norm_weight, norm_bias, eps=eps, norm=norm).to(down_weight.dtype)
    state = functional.silu(functional.linear(state, down_weight, down_bias))
    return torch.sigmoid(functional.linear(state, up_weight, up_bias).squeeze(-1).float())


def draft_top1(hidden_states: Tensor, head_weight: Tensor, head_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the head's top-1 tokens (N,) for normalised hidden states (N, D), and their float32 log-probabilities."""
    logits = functional.linear(hidden_states, head_weight, head_bias)
    top = logits.argmax(dim=-1)
    return top, logits.float().log_softmax(dim=-1).gather(-1, top[:, None]).squeeze(-1)
