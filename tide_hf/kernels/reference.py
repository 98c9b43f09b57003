"""The ops that kernels fuse, in plain PyTorch.

Each has a kernel of the same name and meaning in `hub_kernels/tide-kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NORMS = ("rms", "rms_float32", "rms_one_plus", "layer")


def normalize(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, norm: str = "rms"
) -> Tensor:
    """A norm over the last dimension, rounded where models of this kind round.

    Args:
        hidden_states: (..., D).
        weight: (D,).
        bias: (D,), for `norm="layer"`; `None` for none.
        eps: Added to the variance.
        norm: `"rms"` rounds the normalised state before the weight comes in (Llama and most others); `"rms_float32"`
            after it (OLMo 2, gpt-oss); `"rms_one_plus"` likewise, with a weight of `1 + weight` (Gemma); `"layer"` is
            LayerNorm.

    Returns:
        (..., D).
    """
    if norm == "layer":
        return functional.layer_norm(hidden_states, hidden_states.shape[-1:], weight, bias, eps)
    wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if norm == "rms":
        return weight * scaled.to(hidden_states.dtype)
    factor = weight.to(wide.dtype)
    return (scaled * (1.0 + factor if norm == "rms_one_plus" else factor)).to(hidden_states.dtype)


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
    exit_threshold: float,
    norm: str = "rms",
) -> tuple[Tensor, Tensor]:
    """Final norm, router MLP, sigmoid and threshold.

    Args:
        hidden_states: (N, D), before the norm.
        norm_weight: (D,).
        norm_bias: (D,) or `None`.
        down_weight: (R, D) of the router's first linear layer, float32.
        down_bias: (R,) float32 or `None`.
        up_weight: (1, R) of its second, float32.
        up_bias: (1,) float32 or `None`.
        eps: Of the norm.
        exit_threshold: A row exits where its score is at least this.
        norm: As in [`normalize`].

    Returns:
        (N,) scores in [0, 1], float32, and (N,) exit mask, bool.
    """
    state = normalize(hidden_states, norm_weight, norm_bias, eps=eps, norm=norm).to(down_weight.dtype)
    state = functional.silu(functional.linear(state, down_weight, down_bias))
    scores = torch.sigmoid(functional.linear(state, up_weight, up_bias).squeeze(-1).float())
    return scores, scores >= exit_threshold


def exit_compact(hidden_states: Tensor, exit_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that stay first, then those that exit, each in their old order.

    Args:
        hidden_states: (N, D).
        exit_mask: (N,) bool, true where a row exits.

    Returns:
        (N, D) rows; (N,) int64 place each came from; (2,) int32 numbers of rows that stay and that exit, on the device.
    """
    indices = torch.argsort(exit_mask.to(torch.uint8), stable=True)
    exiting = exit_mask.sum(dtype=torch.int32)
    return hidden_states[indices], indices, torch.stack([exit_mask.numel() - exiting, exiting]).to(torch.int32)


def exit_scatter(rows: Tensor, indices: Tensor, out: Tensor, limit: Tensor | None = None) -> Tensor:
    """Write `rows[i]` to `out[indices[i]]`.

    Args:
        rows: (M, D).
        indices: (M,) int64, no place twice.
        out: (N, D) of the same dtype; written to.
        limit: (1,) int32 on the device: only the first so many rows. `None` for all.

    Returns:
        `out`.
    """
    if limit is not None:
        within = (torch.arange(rows.shape[0], device=rows.device) < limit)[:, None]
        rows = torch.where(within, rows, out[indices])
    return out.index_copy_(0, indices, rows)


def kv_compact(keys: Tensor, values: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Slot `order[row, i]` of every head becomes slot `i`.

    The kernel moves the slots in place; this makes new tensors.

    Args:
        keys: (rows, heads, slots, key size).
        values: (rows, heads, slots, value size).
        order: (rows, kept) int64, ascending along each row, but for -1 where a slot is of no account.

    Returns:
        Keys and values of the kept slots.
    """
    index = order.clamp(min=0)[:, None, :, None].to(keys.device)
    return tuple(  # type: ignore[return-value]
        slots.gather(2, index.expand(-1, slots.shape[1], -1, slots.shape[3])) for slots in (keys, values)
    )


def draft_top1(hidden_states: Tensor, head_weight: Tensor, head_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The head's top token of each row, and its log-probability.

    Args:
        hidden_states: (N, D), after the final norm.
        head_weight: (V, D).
        head_bias: (V,) or `None`.

    Returns:
        (N,) int64 tokens and (N,) log-probabilities, float32.
    """
    logits = functional.linear(hidden_states, head_weight, head_bias)
    top = logits.argmax(dim=-1)
    return top, logits.float().log_softmax(dim=-1).gather(-1, top[:, None]).squeeze(-1)


def accept_drafts(drafts: Tensor, verified: Tensor) -> tuple[Tensor, Tensor]:
    """The longest prefix of each row's drafts that equals what the full model chose, and the token behind it.

    Args:
        drafts: (rows, K) int64 draft tokens; -1, which equals none, behind a shorter draft.
        verified: (rows, K + 1) int64 tokens of the full model.

    Returns:
        (rows,) int64 `n_matches` and (rows,) int64 `bonus_token`.
    """
    n_matches = (drafts == verified[:, :-1]).to(torch.int64).cumprod(dim=-1).sum(dim=-1)
    return n_matches, verified.gather(-1, n_matches[:, None]).squeeze(-1)


def which_norm(norm: Any, hidden_states: Tensor) -> tuple[str, float] | None:
    """Tell by its output what [`normalize`] calls a norm.

    Args:
        norm: A module with a weight.
        hidden_states: (..., D), for shape, dtype and device.

    Returns:
        The name and eps of the norm that comes closest; `None` where none comes within rounding.
    """
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if eps is None:
        return None
    with torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(0)
        probe = torch.randn(4, hidden_states.shape[-1], generator=generator, device="cpu")
        probe = probe.to(hidden_states)
        expected = norm(probe).double()
        differences = {}
        for name in NORMS:
            ours = normalize(probe, norm.weight, getattr(norm, "bias", None), eps=eps, norm=name).double()
            differences[name] = float((ours - expected).abs().max())
    best = min(differences, key=lambda name: differences[name])
    tolerance = 4 * torch.finfo(hidden_states.dtype).eps * float(expected.abs().max())
    return (best, eps) if differences[best] <= tolerance else None
