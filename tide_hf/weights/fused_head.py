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
        self._tables: tuple[Tensor, ...] | None = None  # cosines, sines and masks for as many slots as K/V have had
        self._slot = torch.empty(1, layer.kv_heads, 1, layer.head_size, dtype=layer.dtype)

    def __call__(self, embeddings: Tensor, fused: Tensor, kv: GrowingLayer) -> Tensor:
        """See `QuickHead`."""
        if (before := embeddings.shape[1] - 1) >= MOST_TOKENS:
            positions = torch.arange(before)[None] + kv.get_seq_length()
            self._head.store(embeddings[:, :before], fused[:, :before], positions, kv)
            embeddings, fused = embeddings[:, before:], fused[:, before:]
        start, width = kv.get_seq_length(), embeddings.shape[1]
        keys, values = kv.with_room(self._slot.expand(-1, -1, width, -1))
        (cos, sin, mask), end = self._tables_for(keys.shape[2], embeddings), start + width
        inputs = fused, cos[:, start:end], sin[:, start:end], mask[:, :, :width]
        output = self._stack([keys], [values], *inputs, torch.tensor(end), beside=(embeddings, self._norm))
        kv.show(end)
        return output[:, -1:]

    def _tables_for(self, slots: int, like: Tensor) -> tuple[Tensor, ...]:
        """Cosines and sines of all positions, (1, slots, head_size), and a mask that leaves out the first slot."""
        if self._tables is None or self._tables[0].shape[1] < slots:
            # Of the tokens before the last one only the K/V matter, whatever they attend to.
            mask = torch.ones(1, 1, MOST_TOKENS, slots, dtype=torch.bool)
            mask[..., 0] = False
            self._tables = *self._head.rope(like, torch.arange(slots)[None]), mask
        return self._tables

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
    gates: list[Any] = [linear.__dict__.get("forward") for linear in (*linears, head.lm_head)]
    if not all(type(gate) is LinearGate for gate in gates):  # no gates, or weights that are integers already
        return None
    products = [product for linear in linears if (product := product_of(linear, layout)) is not None]
    unembed = gates[-1].convert(layout) or gates[-1].convert(PlainWeight)
    if unembed is None or len(products) < len(linears) or not agree(products, dtype):
        return None
    fused = FusedLayer(products, norms[:2], norms[2:], config.head_dim, config.head_dim**-0.5)
    return FusedHead(head, fused, unembed)
