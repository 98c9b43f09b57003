"""Where a causal language model keeps its decoder layers, final norm and head.

Other functions find the lengths at which positions or attention change. CONTRIBUTING.md says how to add a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..common.errors import UnsupportedModelError, UnsupportedOptionError


class Layout(NamedTuple):
    """Module paths of the decoder's parts, relative to the causal language model."""

    layers: str
    norm: str | None
    projection: str | None = None


LAYOUTS = (
    Layout("model.layers", "model.norm"),  # llama, qwen, mistral, gemma, granite, ...
    Layout("model.layers", "model.final_layernorm"),  # phi, jamba, bamba
    Layout("transformer.h", "transformer.ln_f"),  # gpt2, falcon, bloom
    Layout("gpt_neox.layers", "gpt_neox.final_layer_norm"),
    Layout("model.decoder.layers", "model.decoder.final_layer_norm", "model.decoder.project_out"),  # opt
    Layout("backbone.layers", "backbone.norm_f"),  # mamba
    Layout("model.language_model.layers", "model.language_model.norm"),  # gemma3, qwen-vl, llava, ... (multimodal)
    Layout("model.text_model.layers", "model.text_model.norm"),  # idefics3, smolvlm
    Layout("language_model.model.layers", "language_model.model.norm"),  # llama4
    Layout("model.language_model.layers", "model.language_model.final_layernorm"),  # fuyu
    Layout("model.layers", "model.embedding_norm"),  # lfm2
    Layout("model.language_model.layers", "model.language_model.embedding_norm"),  # lfm2_vl
    Layout("model.layers", "model.layer_norm"),  # xglm
    Layout("biogpt.layers", "biogpt.layer_norm"),
    Layout("model.layers", "model.final_norm", "lm_head"),  # modernbert-decoder, whose head follows; recurrent_gemma
    Layout("model.layers", "model.norm_f"),  # nemotron_h
    Layout("transformer.h", "transformer.layernorm"),  # ctrl
    Layout("transformer.blocks", "transformer.norm_f"),  # mpt, dbrx
    Layout("gpt_neox_japanese.layers", "gpt_neox_japanese.final_layer_norm"),
)
TUPLE_LAYERS = frozenset({"falcon", "falcon_h1", "bloom", "bamba", "gpt_neo", "gpt_neox_japanese", "mpt", "zaya"})
WINDOW_FIELDS = ("sliding_window", "window_size")  # config fields; the latter in GPT-Neo
# The name of the cache argument of models; transformers 5.24 renamed it and warns about the old name.
_PREPARED = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _PREPARED else "past_key_values"
CACHE_ARGUMENTS = (CACHE, "past_key_values", "layer_past", "past_key_value", "cache_params")


@dataclass(frozen=True)
class DecoderStructure:
    """The parts of a base model that TIDE uses."""

    layers: tuple[nn.Module, ...]
    norm: nn.Module | None  # the final norm
    projection: nn.Module | None  # between norm and head: OPT's `project_out`
    head: nn.Module  # without scaling or softcapping of the logits
    cache_argument: str  # the parameter of a layer's forward that takes the cache
    is_known: bool  # whether the layout is one of `LAYOUTS`
    returns_tuple: bool  # whether a layer returns `(hidden_states, ...)` instead of `hidden_states`
    is_recurrent: bool  # whether any layer has a recurrent state, which can neither be skipped nor rolled back
    hidden_size: int
    vocab_size: int  # output size of the head

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def head_share(self) -> float:
        """The head's share of the weights that a full-depth pass reads."""
        head = self.vocab_size * self.hidden_size
        layers = sum(parameter.numel() for layer in self.layers for parameter in layer.parameters())
        return head / (head + layers)


def find_structure(model: PreTrainedModel) -> DecoderStructure:
    """Find the decoder layers, final norm and head of `model`; `parity.check_parity` checks them on a probe."""
    if not isinstance(model, PreTrainedModel):
        raise _unsupported(model, "it is no transformers model")
    if not isinstance(model, GenerationMixin):
        raise _unsupported(model, "a model without transformers' generate")
    if model.config.is_encoder_decoder:
        raise _unsupported(model, "an encoder beside the decoder")
    config = model.config.get_text_config()
    num_layers = getattr(config, "num_hidden_layers", None)
    known = next((row for row in LAYOUTS if _fits(model, row, num_layers)), None)
    layout = known or _find_layers(model, num_layers)
    head = model.get_output_embeddings()
    if layout is None or not hasattr(head, "weight"):  # MusicGen has a list of heads
        raise _unsupported(model, "no decoder layers" if layout is None else "no output head (get_output_embeddings())")
    layers, projection = tuple(_resolve(model, layout.layers)), _resolve(model, layout.projection)
    return DecoderStructure(
        layers=layers,
        norm=_resolve(model, layout.norm),
        projection=None if projection is head else projection,
        head=head,
        cache_argument=cache_argument_of(model, layers[0]),
        is_known=known is not None,
        returns_tuple=config.model_type in TUPLE_LAYERS,
        # MiniMax does not set `_is_stateful`, but has a cache class of its own.
        is_recurrent=bool(getattr(model, "_is_stateful", False)) or not model._supports_default_dynamic_cache(),
        hidden_size=config.hidden_size,
        vocab_size=getattr(head, "out_features", head.weight.shape[0]),  # packed weights have other shapes
    )


def check_layers(model: PreTrainedModel, structure: DecoderStructure) -> None:
    """Refuse a model whose decoder layers have been removed, replaced, moved or added. Wrapped layers are accepted."""
    known = structure.layers
    found = {path: tuple(part) for path, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    if any(len(now) == len(known) and all(map(_holds, now, known)) for now in found.values()):
        return
    path, now = max(found.items(), key=lambda item: len({*item[1]} & {*known}), default=("", ()))
    missing = [f"{path}.{i}" for i, layer in enumerate(known) if not any(_holds(one, layer) for one in now)]
    raise UnsupportedModelError(
        "the model's decoder layers are not those that TIDE was attached to",
        got=f"a model without what was {', '.join(missing)}" if missing else f"{len(now)} layers, added or moved",
        expected=f"the same {len(known)} layers in the same order",
        do="Put them back; or detach TIDE, correct config.num_hidden_layers, and attach routers of the new model.",
    )


def _holds(module: nn.Module, layer: nn.Module) -> bool:
    return module is layer or any(part is layer for part in module.modules())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def input_device(model: PreTrainedModel) -> torch.device:
    """The device of a model's inputs. `model.device` is `meta` where accelerate offloads weights."""
    return _device_of(model.get_input_embeddings())


def output_device(structure: DecoderStructure) -> torch.device:
    """The device of the final norm, or of the head where the norm has no weights."""
    has_weights = structure.norm is not None and any(True for _ in structure.norm.parameters())
    return _device_of(structure.norm if has_weights else structure.head)


def _device_of(module: Any) -> torch.device:
    device = next(chain(module.parameters(), module.buffers())).device
    if device.type != "meta":
        return device
    hook = getattr(module, "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or "cpu")


def rope_limits(config: Any) -> dict[str, int]:
    """For each RoPE type, the length beyond which rotary angles depend on the highest position of a pass.

    With `longrope` the angles change once, beyond that length; with `dynamic`, at every longer pass. The text config
    has RoPE parameters for all layers or per layer type.
    """
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict):
        return {}
    found: dict[str, int] = {}
    for rope in (settings, *(value for value in settings.values() if isinstance(value, dict))):
        if (kind := rope.get("rope_type")) in ("longrope", "dynamic"):
            own = rope.get("original_max_position_embeddings")
            own = own or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            found[kind] = min(own, found.get(kind, own))
    return found


def may_replace_cache(config: Any, prompt_length: int) -> bool:
    """Whether a model may replace the cache it is passed, as Phi-3 does beyond its original context length."""
    limit = getattr(config, "original_max_position_embeddings", None)
    return limit is not None and prompt_length > limit


def uses_slot_positions(config: Any, max_length: int) -> bool:
    """Whether attention depends on the number of cache slots, including masked slots, as in long calls of Llama 4.

    `max_length` counts the tokens of prompt and answer, including padding.
    """
    return bool(getattr(config, "attn_temperature_tuning", False)) and max_length > getattr(config, "floor_scale", 0)


def check_rope(config: Any, prompt_length: int, max_length: int) -> None:
    """Refuse to draft if the model's rotary embedding changes within the answer.

    The embedding depends on the highest position of a pass, which may be that of a rejected draft token, so tokens
    could differ from plain decoding.
    """
    for kind, limit in rope_limits(config).items():
        if limit >= max_length or (kind == "longrope" and prompt_length > limit):
            continue
        longer = ", or a prompt longer than that" if kind == "longrope" else ""
        shorten = f"Pass max_new_tokens={limit - prompt_length} or less, or d" if limit > prompt_length else "D"
        raise UnsupportedOptionError(
            "the model's rotary embedding changes within this answer",
            got=f"a prompt of {prompt_length} tokens and max_length={max_length}",
            expected=f"at most {limit} tokens in all{longer}",
            do=f"{shorten}etach TIDE for this call.",
        )


def last_position(config: Any) -> int | None:
    """The number of learned or tabulated position embeddings; `None` for models without such a table."""
    if getattr(config, "rope_parameters", None):
        return None
    return getattr(config, "max_position_embeddings", None)


def bounds_positions(config: Any) -> bool:
    """Whether positions beyond those that an answer reaches do harm, be it those of padding in a multi-token pass.

    They may lie outside the table of position embeddings, or change the rotary embedding of the whole pass.
    """
    return last_position(config) is not None or bool(rope_limits(config))


def has_windows(config: Any) -> bool:
    """Whether some layers have windowed attention, whose window counts cache slots, including masked slots."""
    kinds = set(getattr(config, "layer_types", None) or [])
    return bool(kinds - {"full_attention"}) or any(getattr(config, name, None) for name in WINDOW_FIELDS)


_ABSENT = object()


def _resolve(model: nn.Module, path: str | None, default: object = None) -> Any:
    try:
        return attrgetter(path)(model) if path else None
    except AttributeError:
        return default


def _fits(model: nn.Module, layout: Layout, num_layers: int | None) -> bool:
    has_norm = _resolve(model, layout.norm, _ABSENT) is not _ABSENT
    return has_norm and _is_decoder(_resolve(model, layout.layers), num_layers)


def _find_layers(model: nn.Module, num_layers: int | None) -> Layout | None:
    """Where a list of layers with K/V is, in a model of unknown layout, whose logits n-grams do not need."""
    for path, part in model.named_modules():
        if _is_decoder(part, num_layers) and _cache_argument(part[0]):
            return Layout(path, None)
    return None


def _is_decoder(part: Any, num_layers: int | None) -> bool:
    return isinstance(part, nn.ModuleList) and len(part) == num_layers and num_layers > 1


def cache_argument_of(model: nn.Module, layer: nn.Module) -> str:
    """The parameter of a layer's forward that takes the cache; raises [`UnsupportedModelError`] if there is none."""
    name = _cache_argument(layer)
    if name is None:
        raise _unsupported(model, f"a layer whose forward takes none of {', '.join(CACHE_ARGUMENTS)}")
    return name


def _cache_argument(layer: nn.Module) -> str | None:
    parameters = inspect.signature(type(layer).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def _unsupported(model: object, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} is not a causal language model that tide_hf knows",
        got=found,
        expected="a list of config.num_hidden_layers (at least 2) decoder layers that take a cache, and an output head",
        do="Pass an AutoModelForCausalLM, or see examples/guides/supported-models.md for what is refused, and why.",
    )
