"""The draft head's layer as one call of a C++ kernel, for draft steps of eager calls on a CPU (see `fused_layers`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..depth.kv_cache import GrowingLayer
from ..kernels.cpu.cpp_kernels import are_ready
from ..routers.draft_head import DraftHead
from .fused_layers import ATTENTION, HEAD_NORMS, MLP, FusedLayer, FusedStack, agree, norm_of, product_of
from .layouts import PlainWeight, WeightLayout
from .linear_gate import LinearGate

MOST_TOKENS = 8  # of a step; the K/V of more are stored by the head itself, without running its layer on them


class FusedHead:
    """Runs a draft head for one row, as [`DraftHead.forward`] does; see [`depth.head_drafting.QuickHead`]."""

    def __init__(self, head: DraftHead, layer: FusedLayer, unembed: WeightLayout) -> None:
        own: Any = head.layers[0]
        self._head, self._stack, self._norm = head, FusedStack([layer]), own.input_layernorm.weight
        self._unembed = unembed
        self._angles: tuple[Tensor, Tensor] | None = None  # of the positions so far
        self._mask = torch.empty(1, 1, 0, 0, dtype=torch.bool)
        self._slot = torch.empty(1, layer.kv_heads, 1, layer.head_size, dtype=layer.dtype)

    def __call__(self, embeddings: Tensor, fused: Tensor, kv: GrowingLayer) -> Tensor:
        """See `QuickHead`."""
        if (before := embeddings.shape[1] - 1) >= MOST_TOKENS:
            positions = torch.arange(before)[None] + kv.get_seq_length()
            self._head.store(embeddings[:, :before], fused[:, :before], positions, kv)
            embeddings, fused = embeddings[:, before:], fused[:, before:]
        start, width = kv.get_seq_length(), embeddings.shape[1]
        keys, values = kv.with_room(self._slot.expand(-1, -1, width, -1))
        (cos, sin), mask, end = self._prepared(keys.shape[2], embeddings), self._mask[:, :, :width], start + width
        angles, beside = (cos[:, start:end], sin[:, start:end]), (embeddings, self._norm)
        output = self._stack([keys], [values], fused, *angles, mask, torch.tensor(end), beside)
        kv.show(end)
        return output[:, -1:]

    def _prepared(self, slots: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The angles of the positions in as many slots; `_mask` then shows all but the first of them."""
        if self._angles is None or self._angles[0].shape[1] < slots:
            self._angles = self._head.rope(like, torch.arange(slots)[None])
            # Of the tokens before the last one only the K/V matter, whatever they attend to.
            self._mask = torch.ones(1, 1, MOST_TOKENS, slots, dtype=torch.bool)
            self._mask[..., 0] = False
        return self._angles

    def logits(self, normalised: Tensor) -> Tensor:
        """Logits (..., draft vocabulary) of the normalised output (..., D)."""
        return self._unembed.apply(normalised, None)


def fused_head(head: DraftHead, layout: type[WeightLayout] = PlainWeight) -> FusedHead | None:
    """What runs a head, whose weights are read in a layout.

    `None` if its layer is not of Llama's kind, or the kernels for its dtype are not ready.
    """
    config, layer = head.config, head.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    if config.norm_before_residual or config.hidden_act != "silu":
        return None
    parts: list[Any] = [layer.hidden_norm, layer.post_attention_layernorm]
    parts += [getattr(attention, name) for name in HEAD_NORMS if config.qk_norm]
    norms = [norm for part in parts if (norm := norm_of(part)) is not None]
    if len(norms) < len(parts) or not are_ready(dtype := norms[0].weight.dtype):
        return None
    linears = [*(getattr(attention, name) for name in ATTENTION), *(getattr(mlp, name) for name in MLP)]
    products = [product for linear in linears if (product := product_of(linear, layout)) is not None]
    gate = head.lm_head.__dict__.get("forward")
    unembed = gate.convert(layout) or gate.convert(PlainWeight) if isinstance(gate, LinearGate) else None
    if unembed is None or len(products) < len(linears) or not agree(products, dtype):
        return None
    fused = FusedLayer(products, norms[:2], norms[2:], config.head_dim, config.head_dim**-0.5)
    return FusedHead(head, fused, unembed)
