"""Draft heads of others: equal to the `speculators` package's own forward, and refused where they do not fit."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from draft_heads import HEADS, REFERENCE, base_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import BaseModelMismatchError, ConfigurationError, RoutersFileError, RoutersNotFoundError
from tide_hf.routers.eagle3 import read_foreign


def original_format(folder: Path, *, pickled: bool = True) -> None:
    """Turn a head in the speculators format into one as EAGLE-3's authors publish them."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    flat = config["transformer_layer_config"] | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 24}
    flat["eagle_config"] = {name: config[name] for name in ("eagle_aux_hidden_state_layer_ids", "norm_before_fc")}
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    (folder / "model.safetensors").unlink()
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", [*HEADS, "original", "original, pickled"])
def test_a_head_computes_what_the_reference_does(name, tmp_path):
    """At each step of each draft, fed with the tokens of the text as the reference is."""
    folder = copytree(REFERENCE / (name if name in HEADS else "plain"), tmp_path / "head")
    if name not in HEADS:
        original_format(folder, pickled=name.endswith("pickled"))
    reference = load_file(folder / "reference.safetensors")
    head = read_foreign(folder).routers_for(base_model()).draft_head
    ids, fused, logits = reference["ids"], head.fuse(reference["tapped"]), reference["logits"]
    embeddings, length = head.embed_tokens(ids), ids.shape[1]
    for first in range(1, length):  # the last token of the text before the draft
        kv = DynamicLayer()
        if first > 1:
            head.store(embeddings[:, 1:first], fused[:, : first - 1], torch.arange(1, first)[None], kv)
        state = fused[:, first - 1 : first]
        for step in range(min(logits.shape[0], length - first)):
            at = first + step
            output = head(embeddings[:, at : at + 1], state, torch.tensor([[at]]), kv, None)
            token, _, state = head.draft(output)
            torch.testing.assert_close(
                head.lm_head(head.norm(output))[0, 0], logits[step, first - 1], atol=1e-5, rtol=0
            )
            best = int(logits[step, first - 1].argmax())
            assert int(token) == best + int(head.d2t[best])


def _without(*names):
    return lambda config, tensors: [tensors.pop(name) for name in names]


def _set(name, value):
    return lambda config, tensors: tensors.update({name: value(tensors[name])})


def _config(**changes):
    return lambda config, tensors: config.update(changes)


def _layer(**changes):
    return lambda config, tensors: config["transformer_layer_config"].update(changes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_without("fc.weight"), RoutersFileError, "fc.weight"),
        (_set("norm.weight", lambda one: one[:-1]), RoutersFileError, "norm.weight"),
        (_set("norm.weight", lambda one: one * torch.nan), RoutersFileError, "NaN"),
        (_set("d2t", lambda one: one + 20), RoutersFileError, "d2t"),
        (_set("d2t", lambda one: one * 0 - torch.arange(24)), RoutersFileError, "d2t"),
        (_set("t2d", lambda one: ~one), RoutersFileError, "d2t"),
        (_set("lm_head.weight", lambda one: one.long()), RoutersFileError, "lm_head.weight"),
        (_config(speculators_model_type="dflash"), RoutersFileError, "'dflash'"),
        (_config(transformer_layer_config=[1]), RoutersFileError, "transformer_layer_config"),
        (_layer(num_hidden_layers=2), RoutersFileError, "2 layer"),
        (_layer(model_type="gpt2"), RoutersFileError, "'gpt2'"),
        (_layer(num_attention_heads="many"), RoutersFileError, "num_attention_heads"),
        (_layer(rope_parameters={"rope_type": "import os"}), ConfigurationError, "rope_parameters"),
        (_layer(head_dim=2**30), ConfigurationError, "head_dim"),
        (_config(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), BaseModelMismatchError, "layers"),
        (_config(eagle_aux_hidden_state_layer_ids="all"), ConfigurationError, "tap_layers"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(change, error, message, tmp_path):
    folder = copytree(REFERENCE / "llama", tmp_path / "head")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    model = base_model()
    with pytest.raises(error, match=message) as caught:
        TIDEModelForCausalLM.attach(model, folder)
    assert {"got", "expected", "do"} <= set(vars(caught.value)) | {"got", "expected", "do"}
    assert type(model) is LlamaForCausalLM


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"vocab_size": 40}, {"num_hidden_layers": 3}])
def test_a_head_for_another_base_model_is_refused(changes):
    with pytest.raises(BaseModelMismatchError, match="another base model"):
        TIDEModelForCausalLM.attach(base_model(**changes), REFERENCE / "llama")


def test_a_pickle_cannot_run_code_and_weights_must_be_there(tmp_path):
    folder = copytree(REFERENCE / "plain", tmp_path / "head")
    original_format(folder)
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(RoutersFileError, match=r"pytorch_model\.bin"):
        read_foreign(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(RoutersNotFoundError):
        read_foreign(folder)


def test_a_loaded_head_is_saved_with_routers_and_loads_again(tmp_path):
    model = base_model()
    TIDEModelForCausalLM.attach(model, REFERENCE / "qwen3")
    routers = model._tide.routers
    routers.save_pretrained(tmp_path / "routers")
    TIDEModelForCausalLM.attach(model, tmp_path / "routers")
    for name, tensor in routers.state_dict().items():
        assert torch.equal(model._tide.routers.state_dict()[name], tensor), name
