"""Draft heads in other formats: that of the `speculators` package, and EAGLE-3's own (arXiv 2503.01840)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..base_model.structure import DecoderStructure, find_structure
from ..base_model.wrappers import base_inside
from ..common.errors import BaseModelMismatchError, RoutersFileError, first_line, quoted, short
from .config import find_file, holds_routers, read_config
from .draft_head import DraftHead, DraftHeadConfig
from .files import DAMAGE, translated_errors
from .routers import TIDERouters
from .speculators import FLAGS, LAYER_FIELDS, TAPS

LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# Tensors that a head does without: `t2d` follows from `d2t`, the others belong to the base model.
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


def is_foreign(config: Any) -> bool:
    """Whether a `config.json` is that of a draft head in another format."""
    if not isinstance(config, dict) or holds_routers(config):
        return False
    return "speculators_model_type" in config or _names_eagle3(config)


def _names_eagle3(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)


@dataclass(frozen=True)
class ForeignHead:
    """The files of a draft head, read but not yet checked against a base model."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def routers_for(self, model: PreTrainedModel) -> TIDERouters:
        """Make routers for `model`, which have this draft head alone.

        Raises:
            BaseModelMismatchError: The head was made for a model of another shape.
            RoutersFileError: Tensors are missing, unknown, of other shapes, or hold NaN or infinite values.
            ConfigurationError: The config has impossible values.
        """
        model = base_inside(model)
        structure, tensors = find_structure(model), dict(self.tensors)
        shape = self._shape(structure, "embed_tokens.weight" in tensors)
        self._check_base(structure, tensors, shape)
        tensors.setdefault("d2t", torch.zeros(shape["draft_vocab_size"], dtype=torch.long))
        routers = TIDERouters.for_model(model, exit_layers=[], draft_head=shape)
        self._check_tensors(tensors, DraftHeadConfig.from_dict(shape), structure.vocab_size)
        head: Any = routers.draft_head
        head.load_state_dict({**tensors, "confidence": head.confidence})
        routers.config.name_or_path = routers.name_or_path = self.name
        return routers

    def _shape(self, structure: DecoderStructure, has_embedding: bool) -> dict[str, Any]:
        """The fields of `DraftHeadConfig`."""
        config, eagle = self.config, self.config.get("eagle_config") or {}
        layer = config.get("transformer_layer_config", config)
        if not (isinstance(layer, dict) and isinstance(eagle, dict)):
            raise self._refuse(short([layer, eagle]), "JSON objects as transformer_layer_config and eagle_config")
        kind = layer.get("model_type", "llama")
        if kind not in LAYERS or layer.get("num_hidden_layers", 1) != 1:
            got = f"{layer.get('num_hidden_layers', 1)} layer(s) of model_type {kind!r}"
            raise self._refuse(got, f"one layer of model_type {' or '.join(map(repr, LAYERS))}")
        rope = layer.get("rope_parameters") or {
            "rope_theta": layer.get("rope_theta", 10000.0),
            **(layer.get("rope_scaling") or {"rope_type": "default"}),
        }
        try:
            # Fields that have their default value are left out of a config that transformers saves.
            known = {name: layer[name] for name in LAYER_FIELDS if layer.get(name) is not None}
            filled = LAYERS[kind](**known)
        except (StrictDataclassError, TypeError, ValueError, ArithmeticError) as error:
            raise self._refuse(quoted(error), "the config of a decoder layer") from error
        values = {name: getattr(filled, name, False) for name in LAYER_FIELDS}
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        values |= {name: bool(eagle.get(name, config.get(name))) for name in FLAGS}
        size, layers = structure.vocab_size, structure.num_layers
        default = sorted({min(2, layers), layers // 2, max(layers - 3, 0)})  # as in EAGLE-3
        return values | {
            "rope_parameters": rope,
            "qk_norm": kind == "qwen3",
            "tap_layers": config.get(TAPS) or eagle.get(TAPS) or default,
            "target_hidden_size": config.get("target_hidden_size") or values["hidden_size"],
            "draft_vocab_size": config.get("draft_vocab_size") or layer.get("vocab_size", size),
            "has_embedding": has_embedding,
        }

    def _check_base(self, structure: DecoderStructure, tensors: Mapping[str, Tensor], shape: dict[str, Any]) -> None:
        layer = self.config.get("transformer_layer_config", self.config)
        t2d, taps = tensors.get("t2d"), shape["tap_layers"]
        vocabulary = len(t2d) if t2d is not None else layer.get("vocab_size", structure.vocab_size)
        deepest = max((tap for tap in taps if type(tap) is int), default=0) if isinstance(taps, list) else 0
        ours = (shape["target_hidden_size"], vocabulary, max(deepest, structure.num_layers))
        theirs = (structure.hidden_size, structure.vocab_size, structure.num_layers)
        if ours != theirs:
            raise BaseModelMismatchError(
                f"the draft head at {self.name} belongs to another base model",
                got=f"a head for a model of (hidden size, vocabulary, layers) {ours}",
                expected=f"{theirs}",
                do="Load a head that was trained for this model, or make one with tide_hf.calibrate().",
            )

    def _check_tensors(self, tensors: dict[str, Tensor], config: DraftHeadConfig, vocab_size: int) -> None:
        with torch.device("meta"):
            expected = {name: tuple(one.shape) for name, one in DraftHead(config, vocab_size).state_dict().items()}
        expected.pop("confidence")
        t2d = tensors.get("t2d")
        for name in set(UNUSED) & set(tensors):
            del tensors[name]
        found = {name: tuple(one.shape) for name, one in tensors.items()}
        if found != expected:
            wrong = {name: found.get(name) for name in sorted(expected.keys() ^ found.keys())} or {
                name: shape for name, shape in found.items() if expected[name] != shape
            }
            raise self._refuse(f"tensors {short(wrong)}", f"{short({name: expected.get(name) for name in wrong})}")
        for name, tensor in tensors.items():
            if tensor.is_floating_point() != (name != "d2t") or not bool(torch.isfinite(tensor).all()):
                raise self._refuse(f"{name} of {tensor.dtype} with NaN, infinite or no numbers", "finite numbers")
        tokens = torch.arange(config.draft_vocab_size) + tensors["d2t"].long()
        is_in_vocabulary = bool(((tokens >= 0) & (tokens < vocab_size)).all()) and len(tokens.unique()) == len(tokens)
        if not is_in_vocabulary or (
            t2d is not None and not (bool(t2d[tokens].all()) and int(t2d.sum()) == len(tokens))
        ):
            raise self._refuse("d2t with other than distinct token ids", "what t2d says, within the vocabulary")

    def _refuse(self, got: str, expected: str) -> RoutersFileError:
        return RoutersFileError(
            f"the draft head at {self.name} cannot be used",
            got=got,
            expected=expected,
            do="Load it again from its source, or make a head with tide_hf.calibrate().",
        )


def read_foreign(name_or_path: str | os.PathLike[str], **where: Any) -> ForeignHead | None:
    """Read a draft head in another format from a folder or a Hub repository; `None` if there are routers of our own.

    Weights are `model.safetensors`, or else `pytorch_model.bin`, read with `weights_only=True`, so code in it cannot
    run. `where` is as for `find_file`.

    Raises:
        RoutersFileError: It is of another kind than EAGLE-3, or damaged.
        RoutersNotFoundError: There is no such folder or repository, or it has no weights.
    """
    name = str(name_or_path)
    with translated_errors(name):
        config, commit = read_config(name_or_path, **where)
        if not is_foreign(config):
            return None
        kind = config.get("speculators_model_type", "eagle3")
        head = ForeignHead(name, config, {})
        if kind != "eagle3":
            raise head._refuse(f"a draft head of kind {kind!r}", "'eagle3'")
        where |= {"revision": commit} if commit else {}
        tensors = _read_tensors(name_or_path, **where)
    return ForeignHead(name, config, {key.replace("midlayer.", "layers.0."): one for key, one in tensors.items()})


def _read_tensors(name_or_path: str | os.PathLike[str], **where: Any) -> dict[str, Tensor]:
    try:
        return load(find_file(name_or_path, SAFE_WEIGHTS_NAME, **where).read_bytes())
    except OSError:
        file = Path(find_file(name_or_path, WEIGHTS_NAME, **where))
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        return {str(name): tensor.contiguous() for name, tensor in tensors.items()}
    except DAMAGE as error:
        raise ValueError(f"{WEIGHTS_NAME}: {type(error).__name__}: {first_line(error)}") from error
