"""Draft heads of others: equal to the `speculators` package's own forward, and refused where they do not fit."""

import json
import operator
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from shutil import copytree

import pytest
import torch
from draft_heads import HEADS, REFERENCE, base_model, original_format
from hostile_heads import layer, tensors, top
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import (
    BaseModelMismatchError,
    ConfigurationError,
    RoutersFileError,
    RoutersNotFoundError,
    TIDEError,
)
from tide_hf.routers.eagle3 import ForeignHead, read_foreign


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (tensors(fc__weight=None), RoutersFileError, "fc.weight"),
        (tensors(norm__weight=torch.ones(15)), RoutersFileError, "norm.weight"),
        (tensors(norm__weight=torch.full((16,), torch.nan)), RoutersFileError, "NaN"),
        (tensors(d2t=torch.full((24,), 20)), RoutersFileError, "d2t"),
        (tensors(d2t=-torch.arange(24)), RoutersFileError, "d2t"),
        (tensors(t2d=torch.zeros(32, dtype=torch.bool)), RoutersFileError, "d2t"),
        (tensors(lm_head__weight=torch.ones(24, 16).long()), RoutersFileError, "lm_head.weight"),
        (top(speculators_model_type="dflash"), RoutersFileError, "'dflash'"),
        (top(transformer_layer_config=[1]), RoutersFileError, "transformer_layer_config"),
        (layer(num_hidden_layers=2), RoutersFileError, "2 layer"),
        (layer(model_type="gpt2"), RoutersFileError, "'gpt2'"),
        (layer(num_attention_heads="many"), ConfigurationError, "num_attention_heads"),
        (layer(rope_parameters={"rope_type": "import os"}), ConfigurationError, "rope_parameters"),
        (layer(head_dim=2**30), ConfigurationError, "head_dim"),
        (top(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), BaseModelMismatchError, "layers"),
        (top(eagle_aux_hidden_state_layer_ids="all"), ConfigurationError, "tap_layers"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(change, error, message, tmp_path):
    change(copytree(REFERENCE / "llama", tmp_path / "head"))
    model = base_model()
    with pytest.raises(error, match=message):
        TIDEModelForCausalLM.attach(model, tmp_path / "head")
    assert type(model) is LlamaForCausalLM


def paths(value, path=()):
    """The paths of all values inside a value, its own among them."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for name, one in inner for found in paths(one, (*path, name)))]


@pytest.mark.parametrize("value", [None, True, -1, 3, 2**20, 10**300, 0.5, float("nan"), "1", [], [[1]], {"a": 1}])
@pytest.mark.parametrize("is_flat", [False, True])
def test_any_config_is_refused_or_gives_a_head(value, is_flat):
    config, held = json.loads((REFERENCE / "llama/config.json").read_text()), read_foreign(REFERENCE / "llama").tensors
    if is_flat:
        inner = config.pop("transformer_layer_config")
        del inner["rope_parameters"]
        scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 10000.0}
        config |= {**inner, **scaling, "eagle_config": {"norm_before_fc": False}}
    model = base_model()
    for path in paths(config)[1:]:
        fields = deepcopy(config)
        reduce(operator.getitem, path[:-1], fields)[path[-1]] = value
        with suppress(TIDEError):
            head = ForeignHead("a head", fields, held).routers_for(model).draft_head
            assert head.rope(torch.ones(1), torch.tensor([[0, 9999]]))[0].shape[-1] == head.config.head_dim


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2] * 4, "factor": 4.0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"partial_rotary_factor": None},
        {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 1.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 512},
        {"rope_type": "longrope", "original_max_position_embeddings": 512, **FACTORS},
    ],
    ids=lambda fields: fields.get("rope_type", "default"),
)
def test_each_rotary_embedding_is_accepted_and_kept(fields, tmp_path):
    rope = {"rope_theta": 10000.0, "rope_type": "default", **fields}
    layer(rope_parameters=rope)(copytree(REFERENCE / "llama", tmp_path / "head"))
    routers = read_foreign(tmp_path / "head").routers_for(base_model())
    assert routers.config.draft_head["rope_parameters"] == rope
    assert routers.draft_head.rope(torch.ones(1), torch.tensor([[0, 9999]]))[0].isfinite().all()


def test_a_map_of_the_vocabulary_in_32_bits_is_accepted(tmp_path):
    d2t = load_file(REFERENCE / "llama/model.safetensors")["d2t"]
    tensors(d2t=d2t.int())(copytree(REFERENCE / "llama", tmp_path / "head"))
    head = read_foreign(tmp_path / "head").routers_for(base_model()).draft_head
    assert head.d2t.dtype == torch.int64
    assert torch.equal(head.d2t, d2t)


def test_a_pickle_that_is_refused_is_named_and_weights_must_be_there(tmp_path):
    original_format(copytree(REFERENCE / "plain", tmp_path / "head"))
    pickled = tmp_path / "head" / "pytorch_model.bin"
    torch.save({"fc.weight": print}, pickled)
    with pytest.raises(RoutersFileError, match=r"pytorch_model\.bin"):
        read_foreign(tmp_path / "head")
    pickled.unlink()
    with pytest.raises(RoutersNotFoundError):
        read_foreign(tmp_path / "head")


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"vocab_size": 40}, {"num_hidden_layers": 3}])
def test_a_head_for_another_base_model_is_refused(changes):
    with pytest.raises(BaseModelMismatchError, match="another base model"):
        TIDEModelForCausalLM.attach(base_model(**changes), REFERENCE / "llama")


def test_a_loaded_head_is_saved_with_routers_and_loads_again(tmp_path):
    model = base_model()
    TIDEModelForCausalLM.attach(model, REFERENCE / "qwen3")
    routers = model._tide.routers
    routers.save_pretrained(tmp_path / "routers")
    TIDEModelForCausalLM.attach(model, tmp_path / "routers")
    for name, tensor in routers.state_dict().items():
        assert torch.equal(model._tide.routers.state_dict()[name], tensor), name
