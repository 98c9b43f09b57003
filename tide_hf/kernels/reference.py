"""What the fused ops compute, in plain PyTorch, as far as it runs where there are no kernels.

`hub_kernels/tide-kernels/plain.py` has the ops whose plain form is that of the model's own modules.
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
    """Normalise the last dimension of (..., D), rounding to the input's dtype where models with this norm round.

    `"rms"` rounds before the multiplication by the weight (Llama and most others); `"rms_float32"` after it (OLMo 2,
    gpt-oss); `"rms_one_plus"` after it, with a weight of `1 + weight` (Gemma); `"layer"` is LayerNorm.
    """
    if norm == "layer":
        return functional.layer_norm(hidden_states, hidden_states.shape[-1:], weight, bias, eps)
    upcast = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    scaled = upcast * torch.rsqrt(upcast.pow(2).mean(-1, keepdim=True) + eps)
    if norm == "rms":
        return weight * scaled.to(hidden_states.dtype)
    factor = weight.to(upcast.dtype)
    return (scaled * (1.0 + factor if norm == "rms_one_plus" else factor)).to(hidden_states.dtype)


def exit_mask(scores: Tensor, exit_threshold: float | Tensor, may_exit: Tensor | bool = True) -> Tensor:
    """The exit rule: (...) bool, whether a token of those that `may_exit` exits: at `score >= exit_threshold`."""
    return (scores >= exit_threshold) & may_exit


def kv_compact(keys: Tensor, values: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Gather slots of a K/V cache: slot `order[row, i]` of every head becomes slot `i`.

    Keys and values are (rows, heads, slots, size), and `order` (rows, kept) int64 is ascending along each row, or -1
    where the slot's contents do not matter. The kernel moves the slots in place; the reference returns new tensors.
    """
    index = order.clamp(min=0)[:, None, :, None].to(keys.device)
    return tuple(  # type: ignore[return-value]
        slots.gather(2, index.expand(-1, slots.shape[1], -1, slots.shape[3])) for slots in (keys, values)
    )


def which_norm(norm: Any, hidden_states: Tensor) -> tuple[str, float] | None:
    """Identify the variant of [`normalize`] that a norm module computes, by its output.

    The probe has the size, dtype and device of `hidden_states`. Returns the name and eps of the closest variant; `None`
    if none matches up to rounding.
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
