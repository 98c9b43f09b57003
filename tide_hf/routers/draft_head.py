"""The draft head: one decoder layer of its own, in the shape of EAGLE-3 (Li et al. 2025, arXiv 2503.01840).

For the token after position i it reads the embedding of token i + 1, and the fused hidden state of token i: a linear
map of the base model's hidden states at a few layers (`tap_layers`). While it drafts on, its own output stands in for
the fused state. It has its own K/V, needs no layer of the base model to run, and takes nothing from the base model's
layer class, so every family can have one. Parameters are named as in the format of the `speculators` package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ..base_model.unembed import likeliest_tokens
from ..common.errors import first_line
from .config import HEAD_ADVICE, invalid
from .draft_head_config import DraftHeadConfig
from .exit_points import logit_of

# Of transformers and PyTorch, where rotary embeddings are made of parameters that are missing or impossible.
ROPE_ERRORS = (ArithmeticError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError)

# (rows, heads, width, head_dim) queries, (rows, K/V heads, slots, head_dim) keys and values, and a mask that broadcasts
# to (rows, heads, width, slots) or `None` -> (rows, width, heads, head_dim).
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's attention, as an `Attention`."""
    attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2)


def layer_config(config: DraftHeadConfig) -> LlamaConfig:
    """For transformers' rotary embedding."""
    names = ("hidden_size", "num_attention_heads", "head_dim", "rope_parameters", "max_position_embeddings")
    copied = {name: getattr(config, name) for name in names}
    return LlamaConfig(**copied | {"rope_parameters": dict(config.rope_parameters)})  # which transformers adds to


def check_rope(config: DraftHeadConfig) -> None:
    """Raise [`ConfigurationError`] if `rope_parameters` give no rotary embedding of `head_dim`."""
    rope, half = config.rope_parameters, config.head_dim // 2
    factors = (one for one in rope.values() if isinstance(one, list))
    # What is built must be as small as the head, so these are checked first.
    is_small = rope.get("partial_rotary_factor") in (None, 1) and all(len(one) == half for one in factors)
    problem = "" if is_small else f"factors that do not fit a head_dim of {config.head_dim}"
    try:
        if is_small and not _has_rotary(config):
            problem = "infinite values, or another size than head_dim"
    except ROPE_ERRORS as error:
        problem = first_line(error)
    if problem:
        expected = f"what transformers needs for a rope_type of {rope.get('rope_type', 'default')!r}"
        raise invalid("rope_parameters in draft_head", problem, expected, HEAD_ADVICE)


def _has_rotary(config: DraftHeadConfig) -> bool:
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(layer_config(config))
        # Some types compute other frequencies beyond the positions that they were made for.
        both = rotary(torch.ones(1), torch.tensor([[0, 2 * config.max_position_embeddings]]))
    return all(one.shape[-1] == config.head_dim and bool(one.isfinite().all()) for one in both)


class _Attention(nn.Module):
    """Attention of the head, whose projections read embedding and fused state side by side."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.head_dim = config.head_dim

    def queries(self, inputs: Tensor) -> Tensor:
        """(rows, width, 2 D) -> (rows, heads, width, head_dim), before the rotary embedding."""
        return self._heads(self.q_proj(inputs), self.q_norm)

    def keys(self, inputs: Tensor) -> Tensor:
        """(rows, width, 2 D) -> (rows, K/V heads, width, head_dim), before the rotary embedding."""
        return self._heads(self.k_proj(inputs), self.k_norm)

    def values(self, inputs: Tensor) -> Tensor:
        """(rows, width, 2 D) -> (rows, K/V heads, width, head_dim)."""
        return self._heads(self.v_proj(inputs), None)

    def _heads(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.head_dim))
        return (heads if norm is None else norm(heads)).transpose(1, 2)


class _MLP(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, width, bias=bias)
        self.up_proj = nn.Linear(size, width, bias=bias)
        self.down_proj = nn.Linear(width, size, bias=bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, state: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(state)) * self.up_proj(state))


class _Layer(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = _Attention(config), _MLP(config)
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)


class DraftHead(nn.Module):
    """The head, and what calibrates its confidence.

    Attributes:
        d2t: (draft_vocab_size,) what to add to an index of the draft vocabulary for the token id, int64.
        confidence: Scale and shift of the logit of a drafted token's probability (Platt scaling).
        identity: Shared by copies, which have the same weights.
    """

    d2t: Tensor
    rotary: LlamaRotaryEmbedding | None

    def __init__(self, config: DraftHeadConfig, vocab_size: int) -> None:
        super().__init__()
        check_rope(config)
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        fused, count = len(config.tap_layers) * config.target_hidden_size, len(config.tap_layers)
        self.fc = nn.Linear(fused, size, bias=False)
        self.input_norm = LlamaRMSNorm(fused, eps) if config.norm_before_fc else None
        norms = [LlamaRMSNorm(config.target_hidden_size, eps) for _ in range(count if config.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(vocab_size, size) if config.has_embedding else None
        # Its buffer is no part of the module, which may be cast to a dtype with too few digits for positions.
        self.__dict__["rotary"] = None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.confidence = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.identity = uuid4().hex

    @property
    def tokens(self) -> Tensor:
        """(draft_vocab_size,) token ids of the draft vocabulary, int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, tapped: Tensor) -> Tensor:
        """Fuse the hidden states at the tap layers, (..., taps * target_hidden_size), to (..., D)."""
        if self.input_norm is not None:
            tapped = self.input_norm(tapped)
        if self.fc_norm is not None:
            parts = tapped.chunk(len(self.fc_norm), dim=-1)
            tapped = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(tapped)

    def store(self, embeddings: Tensor, fused: Tensor, positions: Tensor, kv: DynamicLayer) -> None:
        """Store the K/V of tokens.

        Args:
            embeddings: (rows, width, D) of the tokens.
            fused: (rows, width, D) fused states of the tokens before them.
            positions: (rows or 1, width) of the tokens, int64.
            kv: The head's K/V, to which those of the tokens are appended.
        """
        inputs, _ = self.inputs(embeddings, fused)
        self._store(inputs, self.rope(inputs, positions), kv)

    def forward(
        self,
        embeddings: Tensor,
        fused: Tensor,
        positions: Tensor,
        kv: DynamicLayer,
        mask: Tensor | None,
        attention: Attention = attend,
    ) -> Tensor:
        """Store the K/V of tokens, and run the head on the last one of each row.

        Args are as for [`store`]; `mask` (rows, slots) is true at the slots that the last token attends to, its own
        included; `None` for all. Returns its output (rows, 1, D), before its norm.
        """
        layer: Any = self.layers[0]
        inputs, residual = self.inputs(embeddings, fused)
        rope = self.rope(inputs, positions)
        keys, values = self._store(inputs, rope, kv)
        if inputs.shape[1] > 1:
            inputs, residual, rope = inputs[:, -1:], residual[:, -1:], (rope[0][:, -1:], rope[1][:, -1:])
        queries = rotate(layer.self_attn.queries(inputs), rope)
        mask = None if mask is None else mask[:, None, None]
        return self.after_attention(residual, attention(queries, keys, values, mask).flatten(2))

    def after_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer, after attention (rows, width, heads * head_dim); returns (rows, width, D)."""
        layer: Any = self.layers[0]
        state = residual + layer.self_attn.o_proj(attended)
        return state + layer.mlp(layer.post_attention_layernorm(state))

    def draft(
        self, state: Tensor, num_tokens: int = 1, unembed: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read the likeliest drafted tokens, best first, from the head's output (rows, 1, D).

        `unembed` is what gives the logits, by default the `lm_head`.

        Returns the token ids (rows, num_tokens), the probabilities that the base model agrees with each (the same
        shape), and the state that the head continues from, (rows, 1, D).
        """
        normalised = self.norm(state)
        logits = (unembed or self.lm_head)(normalised[:, -1]).float()
        log_probabilities, top = likeliest_tokens(logits, num_tokens)
        tokens, scores = self.d2t.to(top.device)[top] + top, self.score(log_probabilities)
        return tokens, scores, normalised if self.config.norm_output else state

    def score(self, log_probabilities: Tensor) -> Tensor:
        """(...) log-probabilities of drafted tokens -> (...) probabilities that the base model agrees."""
        scale, shift = self.confidence.float()
        return torch.sigmoid(scale * logit_of(log_probabilities) + shift)

    def inputs(self, embeddings: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, (rows, width, 2 D), and where the residual branch starts, (rows, width, D)."""
        layer: Any = self.layers[0]
        normalised = layer.hidden_norm(fused)
        inputs = torch.cat([layer.input_layernorm(embeddings), normalised], dim=-1)
        return inputs, normalised if self.config.norm_before_residual else fused

    def rope(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary embedding (cosines, sines) of positions (rows or 1, width), in the dtype of `inputs`."""
        rotary: Any = self.rotary
        if rotary is None or rotary.inv_freq.device != inputs.device:
            rotary = self.__dict__["rotary"] = LlamaRotaryEmbedding(layer_config(self.config)).to(inputs.device)
        return rotary(inputs, positions)

    def _store(self, inputs: Tensor, rope: tuple[Tensor, Tensor], kv: DynamicLayer) -> tuple[Tensor, Tensor]:
        attention: Any = self.layers[0].self_attn
        return kv.update(rotate(attention.keys(inputs), rope), attention.values(inputs))


def rotate(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply a rotary embedding to heads (rows, heads, width, head_dim)."""
    return apply_rotary_pos_emb(heads, heads, *rope)[0]
