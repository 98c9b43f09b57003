"""The shape of a draft head, as it stands in the routers' config, which anybody may have written.

Types are checked by the annotations, which must therefore not be strings (`from __future__ import annotations`).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from ..common.choices import is_number
from ..common.errors import short

MAX_TAPS = 16
MAX_SIZE = 2**20  # beyond that of any head, and small enough that no file makes memory run out
MAX_SIZES = {"draft_vocab_size": 2**24, "max_position_embeddings": 2**24}  # of fields that may be larger
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@strict
@dataclass
class DraftHeadConfig:
    """Shape of a draft head; `rope_parameters` are as in transformers' `LlamaConfig`."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    draft_vocab_size: int
    tap_layers: list[int]  # layers executed before each hidden state that is fused; 0 is the embedding
    target_hidden_size: int  # of the base model
    rms_norm_eps: float = 1e-5
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"] = "silu"
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # of queries and keys, as in Qwen3
    norm_before_residual: bool = False  # whether the residual branch starts from the normalised fused state
    norm_before_fc: bool = False  # one norm of all tapped states together
    fc_norm: bool = False  # one norm for each tapped state
    norm_output: bool = False  # whether the head continues from its normalised output
    has_embedding: bool = False  # its own, instead of the base model's

    def validate_numbers(self) -> None:
        """Refuse values that fit no head."""
        for name, value in vars(self).items():
            largest = MAX_SIZES.get(name, MAX_SIZE)
            if type(value) is int and not 1 <= value <= largest:
                raise ValueError(f"{name} of {short(value)} is not a whole number from 1 to {largest}")
        taps = self.tap_layers
        if not (1 <= len(taps) <= MAX_TAPS and taps[0] >= 0 and taps == sorted(set(taps))):
            raise ValueError(f"tap_layers of {short(taps)} are not 1 to {MAX_TAPS} ascending numbers of layers")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps of {self.rms_norm_eps} is not a small positive number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_key_value_heads of {self.num_key_value_heads} does not divide num_attention_heads")

    def validate_rope(self) -> None:
        """Refuse what is no rotary embedding of transformers; `DraftHead` finds out whether numbers are missing."""
        rope_type = self.rope_parameters.get("rope_type", "default")
        others = [value for name, value in self.rope_parameters.items() if name != "rope_type"]
        numbers = [one for value in others for one in (value if isinstance(value, list) else [value])]
        if rope_type not in ROPE_TYPES or not all(
            type(one) is bool or one is None or is_number(one) for one in numbers
        ):
            kinds = ", ".join(ROPE_TYPES)
            raise ValueError(
                f"rope_parameters of {short(self.rope_parameters)} are not numbers and a rope_type of {kinds}"
            )
