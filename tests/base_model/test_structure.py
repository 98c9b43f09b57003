"""The structure of every family is found, checked on a probe, and refused where it does not reproduce the logits."""

import dataclasses

import pytest
import torch
import transformers
from families import FAMILIES, LAYERS, RECURRENT, VOCAB, tiny_model
from images import seeing_model
from packaging.version import Version
from quantized_weights import quantized
from torch import nn

from tide_hf import TIDEModelForCausalLM, TIDERouters, UnsupportedModelError
from tide_hf.base_model.parity import check_parity
from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.base_model.unembed import DraftUnembed, Unembed, greedy_tokens

FEW = torch.tensor([11, 3, 29, 7])  # tokens to draft


@pytest.mark.parametrize("family", FAMILIES)
def test_structure_and_unembedding(family):
    model = tiny_model(family)
    structure = find_structure(model)
    assert structure.num_layers == LAYERS
    assert structure.hidden_size == 32
    assert structure.vocab_size == VOCAB
    assert structure.is_recurrent == (family in RECURRENT)
    expected = {"falcon": "layer_past", "bloom": "layer_past", "gpt_neox": "layer_past"}
    expected["mamba"] = CACHE if CACHE == "cache" else "cache_params"
    assert structure.cache_argument == expected.get(family, CACHE)
    assert structure.returns_tuple == (family in ("falcon", "bloom", "bamba"))
    check_parity(model, structure)
    states = []
    handle = structure.layers[-1].register_forward_hook(lambda _m, _a, output: states.append(output))
    tokens = torch.randint(3, VOCAB, (2, 7))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        handle.remove()
        state = states[0][0] if structure.returns_tuple else states[0]
        unembed = Unembed(model, structure)
        torch.testing.assert_close(unembed(state), logits)
        assert torch.equal(DraftUnembed(unembed)(state), logits.argmax(dim=-1))
        assert torch.equal(DraftUnembed(unembed, FEW)(state), FEW[logits[..., FEW].argmax(dim=-1)])


def with_quantised_head(**options):
    """An attached model that drafts few tokens with a quantised head, and states to draft from."""
    model = tiny_model("llama", vocab_size=64)
    model.lm_head.weight = quantized(model.lm_head.weight, **options)
    routers = TIDERouters.for_model(model, exit_layers=[1])
    routers.draft_vocab = FEW
    return TIDEModelForCausalLM.attach(model, routers), torch.randn(2, 3, 32)


def test_drafts_copy_the_rows_of_a_quantised_head():
    model, state = with_quantised_head()
    drafts, expected = model._tide.draft_unembed(), model.lm_head(model.model.norm(state))[..., FEW].argmax(dim=-1)
    assert torch.equal(drafts(state), FEW[expected])
    assert model._tide.draft_unembed() is drafts
    model.lm_head.weight = quantized(-model.lm_head.weight.dequantize())
    assert model._tide.draft_unembed() is not drafts
    assert not torch.equal(model._tide.draft_unembed()(state), FEW[expected])


def test_a_head_that_cannot_dequantise_itself_drafts_as_a_whole():
    model, state = with_quantised_head(kind="int4")
    expected = model.lm_head(model.model.norm(state)).argmax(dim=-1)
    assert torch.equal(model._tide.draft_unembed()(state), expected)
    assert model._tide.routers.config.unembed_hash is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_tokens_are_those_of_argmax(dtype):
    torch.manual_seed(0)
    logits = torch.randint(-9, 9, (2, 3, 40_000)).to(dtype)  # with thousands of ties
    logits[1, 1] = -torch.inf
    logits[1, 2, 70:90] = torch.nan  # which `argmax` prefers
    assert torch.equal(greedy_tokens(logits), logits.argmax(dim=-1))


def test_parity_refuses_logits_that_it_cannot_reproduce():
    model = tiny_model("granite")
    structure = find_structure(model)
    wrong_kind = dataclasses.replace(structure, returns_tuple=True)
    with pytest.raises(UnsupportedModelError, match=r"got layers that return Tensor\. Expected the kind"):
        check_parity(model, wrong_kind)
    wrong_norm = dataclasses.replace(structure, norm=None)
    with pytest.raises(UnsupportedModelError, match=r"cannot be reproduced.*got a difference of .*Expected at most"):
        check_parity(model, wrong_norm)
    model.config.num_hidden_layers -= 1  # as in Mllama, some of whose layers run on images alone
    with pytest.raises(UnsupportedModelError, match="got a last layer that does not run on text alone"):
        check_parity(model, structure)
    model.config.num_hidden_layers += 1
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match="got a difference of nan"):
        check_parity(model, structure)
    assert not structure.layers[-1]._forward_hooks


@pytest.mark.parametrize("family", ["gemma3", "cohere2_vision", "paligemma"])
def test_multimodal_models_scale_or_cap_logits_as_they_do_themselves(family):
    if family == "paligemma" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("does not cap logits")
    text = {"logit_scale": 0.25} if family == "cohere2_vision" else {"final_logit_softcapping": 3.0}
    model = seeing_model(family, **text)
    check_parity(model, find_structure(model))


def test_a_model_that_needs_more_than_text_is_refused_in_its_own_words():
    model = tiny_model("llama")
    structure = find_structure(model)

    def refuse(*_):
        raise ValueError("You must specify input_features")

    model.register_forward_pre_hook(refuse)
    with pytest.raises(UnsupportedModelError, match="does not run on text alone: got 'You must specify input"):
        check_parity(model, structure)


def test_the_probe_has_no_padding_and_leaves_each_modules_training_mode_alone():
    """Its tokens may include the pad token, about which transformers would warn."""
    model, masks = tiny_model("llama").train(), []
    model.model.layers[0].eval()
    model.register_forward_pre_hook(lambda _m, _a, given: masks.append(given["attention_mask"]), with_kwargs=True)
    check_parity(model, find_structure(model))
    assert masks[0].all()
    assert model.training
    assert model.model.layers[1].mlp.training
    assert not model.model.layers[0].mlp.training


class LayerWithoutCache(nn.Module):
    def forward(self, hidden_states):
        return hidden_states


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("model.layers", nn.ModuleList(), "got no decoder layers.*that take a cache"),
        ("model.layers", nn.ModuleList(LayerWithoutCache() for _ in range(LAYERS)), f"takes none of {CACHE}"),
        ("get_output_embeddings", lambda: None, "no output head"),
    ],
    ids=["layers", "cache argument", "head"],
)
def test_a_model_without_a_part_is_refused(part, value, message):
    model = tiny_model("llama")
    path, _, name = part.rpartition(".")
    setattr(model.get_submodule(path), name, value)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        find_structure(model)
    assert isinstance(error.value, NotImplementedError)
