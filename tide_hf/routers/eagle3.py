"""Draft heads in other formats: that of the `speculators` package, and EAGLE-3's own (arXiv 2503.01840)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..base_model.structure import DecoderStructure, find_structure
from ..base_model.wrappers import base_inside
from ..common.errors import BaseModelMismatchError, RoutersFileError, short
from .config import HEAD_ADVICE, find_file, holds_routers, invalid, read_config
from .draft_head import DraftHead
from .files import misfit, read_safetensors, translated_errors
from .pickled import read_pickled
from .routers import TIDERouters, config_for
from .speculators import FLAGS, LAYER_FIELDS, TAPS, no_offsets

LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# Tensors that belong to the base model, or follow from the config.
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


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
        structure = find_structure(model)
        shape = self._shape(structure, "embed_tokens.weight" in self.tensors)
        self._check_base(structure, shape)
        config = config_for(model, exit_layers=[], draft_head=shape)
        with torch.device("meta"):  # memory is for tensors that have been checked
            routers = TIDERouters(config)
        head: Any = routers.draft_head
        tensors = self._checked_tensors(head, structure.vocab_size)
        head.load_state_dict({**tensors, "confidence": torch.tensor([1.0, 0.0])}, assign=True)
        routers.config.name_or_path = routers.name_or_path = self.name
        return routers.eval()

    def _shape(self, structure: DecoderStructure, has_embedding: bool) -> dict[str, Any]:
        """The fields of `DraftHeadConfig`."""
        config, eagle = self.config, self.config.get("eagle_config") or {}
        layer = config.get("transformer_layer_config", config)
        if not (isinstance(layer, dict) and isinstance(eagle, dict)):
            raise self._refuse(short([layer, eagle]), "JSON objects as transformer_layer_config and eagle_config")
        kind, count = layer.get("model_type", "llama"), layer.get("num_hidden_layers", 1)
        if kind not in [*LAYERS] or count != 1:
            got = f"{short(count)} layer(s) of model_type {short(kind)}"
            raise self._refuse(got, f"one layer of model_type {' or '.join(map(repr, LAYERS))}")
        scaling = layer.get("rope_scaling") or {"rope_type": "default"}
        if not isinstance(scaling, dict):
            raise self._refuse(f"a rope_scaling of {short(scaling)}", "a JSON object")
        rope = layer.get("rope_parameters") or {"rope_theta": layer.get("rope_theta", 10000.0), **scaling}
        # Fields that have their default value are left out of a config that transformers saves.
        known = {name: layer[name] for name in LAYER_FIELDS if layer.get(name) is not None}
        try:
            filled = LAYERS[kind](**known)
            values = {name: getattr(filled, name, False) for name in LAYER_FIELDS}
            values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        except (StrictDataclassError, ArithmeticError) as error:
            got = " ".join(str(error).split())
            raise invalid("draft_head", got, "the config of a decoder layer", HEAD_ADVICE) from error
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

    def _check_base(self, structure: DecoderStructure, shape: dict[str, Any]) -> None:
        layer = self.config.get("transformer_layer_config", self.config)
        t2d, taps = self.tensors.get("t2d"), shape["tap_layers"]
        vocabulary = len(t2d) if t2d is not None and t2d.dim() else layer.get("vocab_size", structure.vocab_size)
        deepest = max((tap for tap in taps if type(tap) is int), default=0) if isinstance(taps, list) else 0
        ours = (shape["target_hidden_size"], vocabulary, max(deepest, structure.num_layers))
        theirs = (structure.hidden_size, structure.vocab_size, structure.num_layers)
        if ours != theirs:
            raise BaseModelMismatchError(
                f"the draft head at {self.name} belongs to another base model",
                got=f"a head for a model of (hidden size, vocabulary, layers) {short(ours)}",
                expected=f"{theirs}",
                do="Load a head that was trained for this model, or make one with tide_hf.calibrate().",
            )

    def _checked_tensors(self, head: DraftHead, vocab_size: int) -> dict[str, Tensor]:
        """The tensors for a head that is still on the meta device."""
        expected = {name: one for name, one in head.state_dict().items() if name != "confidence"}
        tensors = {"d2t": no_offsets(expected["d2t"].shape), **self.tensors}
        if tensors["d2t"].dtype == torch.int32:
            tensors["d2t"] = tensors["d2t"].long()
        for name in set(UNUSED) & set(tensors):
            del tensors[name]
        if "t2d" in tensors:
            expected["t2d"] = torch.empty(vocab_size, dtype=torch.bool, device="meta")
        if wrong := misfit(tensors, expected):
            raise self._refuse(wrong, "finite tensors that have the names and shapes of its config")
        tokens, t2d = torch.arange(len(tensors["d2t"])) + tensors["d2t"], tensors.pop("t2d", None)
        is_in_vocabulary = bool(((tokens >= 0) & (tokens < vocab_size)).all()) and len(tokens.unique()) == len(tokens)
        if not is_in_vocabulary or (
            t2d is not None and not (bool(t2d[tokens].all()) and int(t2d.sum()) == len(tokens))
        ):
            raise self._refuse("d2t with other than distinct token ids", "what t2d says, within the vocabulary")
        return {name: tensor.to(expected[name].dtype).contiguous() for name, tensor in tensors.items()}

    def _refuse(self, got: str, expected: str) -> RoutersFileError:
        return RoutersFileError(
            f"the draft head at {self.name} cannot be used",
            got=got,
            expected=expected,
            do="Load it again from its source, or make a head with tide_hf.calibrate().",
        )


def read_foreign(name_or_path: str | os.PathLike[str], **where: Any) -> ForeignHead | None:
    """Read a draft head in another format from a folder or a Hub repository; `None` if there are routers of our own.

    Weights are `model.safetensors`, or else `pytorch_model.bin`, in which code cannot run. `where` is as for
    `find_file`.

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
            raise head._refuse(f"a draft head of kind {short(kind)}", "'eagle3'")
        where |= {"revision": commit} if commit else {}
        tensors = _read_tensors(name_or_path, **where)
    return ForeignHead(name, config, {key.replace("midlayer.", "layers.0."): one for key, one in tensors.items()})


def _read_tensors(name_or_path: str | os.PathLike[str], **where: Any) -> dict[str, Tensor]:
    try:
        return read_safetensors(find_file(name_or_path, SAFE_WEIGHTS_NAME, **where))[1]
    except OSError:
        tensors = read_pickled(find_file(name_or_path, WEIGHTS_NAME, **where))
    if not (isinstance(tensors, dict) and all(isinstance(one, Tensor) for one in tensors.values())):
        raise ValueError(f"{WEIGHTS_NAME} with other than tensors by name")
    return {str(name): tensor for name, tensor in tensors.items()}
