"""The block head: a translator and a decoder layer, which draft from the hidden states of a shallow layer.

A linear head sees the hidden state at its exit layer. The block head also sees the previous token's last hidden state,
which the last verify pass has computed, and attends to all earlier tokens through its own K/V (compare EAGLE, arXiv
2401.15077). It therefore drafts from far fewer layers than a linear head. `early_exit` cannot use it: a token that
exits has no last hidden state for the next token to read.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from ..base_model.structure import TUPLE_LAYERS, DecoderStructure, cache_argument_of, find_structure
from ..common.errors import ConfigurationError, TIDEError, UnsupportedModelError

# Errors that transformers' constructors raise for a config that fits no model.
BUILD_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError)
JSON_TYPES = (str, int, float, bool, list, dict, type(None))
PROBE_VOCABULARY = 8  # vocabulary size of the two-layer model from which the layer is taken


class BlockHead(nn.Module):
    """Translator and decoder layer, built from `block_config` (see `block_config_of`), with cache index `layer_idx`."""

    def __init__(self, hidden_size: int, block_config: dict[str, Any], layer_idx: int) -> None:
        super().__init__()
        self.translator = nn.Linear(2 * hidden_size, hidden_size)
        self.layer, self.returns_tuple = _build_layer(block_config)
        self.layer.to(self.translator.weight.dtype)  # the layer was built in the dtype of the base model's config
        for module in self.layer.modules():
            if "layer_idx" in vars(module):
                setattr(module, "layer_idx", layer_idx)  # noqa: B010  # mypy takes module attributes for tensors

    def translate(self, hidden_states: Tensor, prev_hidden_state: Tensor) -> Tensor:
        """Merge two hidden states, each (..., D) after the final norm, into the input (..., D) of the decoder layer."""
        return self.translator(torch.cat([hidden_states, prev_hidden_state], dim=-1))

    def state_of(self, output: Any) -> Tensor:
        """The hidden states in the layer's output."""
        return output[0] if self.returns_tuple else output

    def use_attention_of(self, config: Any) -> None:
        """Use the attention implementation of the base model, since the block head gets the base model's masks."""
        for module in self.layer.modules():
            layer_config: Any = vars(module).get("config")
            if layer_config is not None:
                layer_config._attn_implementation = config._attn_implementation


def block_config_of(model: PreTrainedModel, structure: DecoderStructure, block_layer: int) -> dict[str, Any]:
    """Return the config, in JSON types, of a block head that drafts after `block_layer` layers of `model`.

    Raises [`UnsupportedModelError`] if the next layer lacks full attention, or cannot be built from a config alone.
    """
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    kind = types[block_layer] if types else None
    may_slide = types is None and getattr(config, "use_sliding_window", True)
    sliding = may_slide and getattr(config, "sliding_window", None)
    if structure.is_recurrent or kind not in (None, "full_attention") or sliding:
        raise _no_block(model, f"layer {block_layer} of kind {kind or 'sliding_attention'}")
    if types and kind not in types[:block_layer]:  # the first layer of a kind sets the width of that kind's mask
        raise _no_block(model, f"no layer of kind {kind} before layer {block_layer}")
    settings = config.to_diff_dict()
    settings |= {"model_type": config.model_type, "num_hidden_layers": 2, "vocab_size": PROBE_VOCABULARY}
    settings |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if types:
        settings["layer_types"] = [kind, kind]
    layer, _ = _build_layer(settings)
    if {name: p.shape for name, p in layer.named_parameters()} != {
        name: p.shape for name, p in structure.layers[block_layer].named_parameters()
    } or list(layer.buffers()):
        raise _no_block(model, f"layer {block_layer}, which cannot be built from the model's config alone")
    return {name: value for name, value in settings.items() if isinstance(value, JSON_TYPES)}


def _build_layer(block_config: dict[str, Any]) -> tuple[nn.Module, bool]:
    settings = dict(block_config)
    try:
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # the text model of a multimodal model has no head
            model = AutoModel.from_config(config)
            cache_argument_of(model, model.layers[0])
            return model.layers[0], config.model_type in TUPLE_LAYERS
        structure = find_structure(AutoModelForCausalLM.from_config(config))
    except TIDEError:
        raise
    except BUILD_ERRORS as error:
        raise ConfigurationError(
            "a block head cannot be built",
            got=f"block_config that fails with '{error!r:.200}'",
            expected="the text config of a causal language model of transformers",
            do="Make routers with tide_hf.calibrate(exit_strategy='block').",
        ) from error
    return structure.layers[0], structure.returns_tuple


def _no_block(model: PreTrainedModel, got: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a block head cannot be made for {type(model).__name__}",
        got=got,
        expected="a decoder layer that attends to the whole sequence and holds nothing but weights",
        do="Choose another exit layer, or exit_strategy='linear'.",
    )
