"""The structure of every family is found, proved on a probe, and refused where it is not right."""

import dataclasses

import pytest
import torch
import transformers
from families import FAMILIES, LAYERS, RECURRENT, VOCAB, tiny_model
from images import seeing_model
from packaging.version import Version
from torch import nn

from tide_hf import UnsupportedModelError
from tide_hf.base_model.parity import check_parity
from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.base_model.unembed import DraftUnembed, Unembed, greedy_tokens, hash_distance, unembed_hash


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
        few = torch.tensor([11, 3, 29, 7])
        assert torch.equal(DraftUnembed(unembed, few)(state), few[logits[..., few].argmax(dim=-1)])


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_rows_of_a_head_are_current_until_it_is_written_to(part):
    model = tiny_model("phi")  # whose head has a bias
    draft_unembed = DraftUnembed(Unembed(model, find_structure(model)), torch.tensor([11, 3]))
    assert draft_unembed.is_current()
    with torch.no_grad():
        getattr(model.lm_head, part).add_(1.0)
    assert not draft_unembed.is_current()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_equal_logits_the_first_is_the_top_token(dtype):
    torch.manual_seed(0)
    logits = torch.randint(-9, 9, (2, 3, 40_000)).to(dtype)  # thousands of each
    logits[1, 1] = -torch.inf
    logits[1, 2, 70:90] = torch.nan  # which `argmax` prefers
    assert torch.equal(greedy_tokens(logits), logits.argmax(dim=-1))


def test_parity_refuses_what_it_cannot_reproduce():
    model = tiny_model("granite")
    structure = find_structure(model)
    wrong_kind = dataclasses.replace(structure, returns_tuple=True)
    with pytest.raises(UnsupportedModelError, match=r"got layers that return Tensor\. Expected the kind"):
        check_parity(model, wrong_kind)
    wrong_norm = dataclasses.replace(structure, norm=None)
    with pytest.raises(UnsupportedModelError, match=r"cannot be reproduced.*got a difference of .*Expected at most"):
        check_parity(model, wrong_norm)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match="got a difference of nan"):
        check_parity(model, structure)
    assert not structure.layers[-1]._forward_hooks


@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        "cohere2_vision",
        pytest.param(
            "paligemma",
            marks=pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="does not cap logits"),
        ),
    ],
)
def test_a_model_around_a_text_model_does_to_logits_what_it_does_itself(family):
    text = {"logit_scale": 0.25} if family == "cohere2_vision" else {"final_logit_softcapping": 3.0}
    model = seeing_model(family, **text)
    check_parity(model, find_structure(model))


def test_a_model_that_wants_more_than_text_is_told_in_its_own_words():
    model = tiny_model("llama")
    structure = find_structure(model)

    def refuse(*_):
        raise ValueError("You must specify input_features")

    model.register_forward_pre_hook(refuse)
    with pytest.raises(UnsupportedModelError, match="does not run on text alone: got 'You must specify input"):
        check_parity(model, structure)


def test_the_probe_says_that_nothing_in_it_is_padding():
    """Its tokens may be a model's pad token, of which transformers would warn whoever attaches."""
    model = tiny_model("gpt2")
    seen = []
    model.register_forward_pre_hook(lambda _m, _a, given: seen.append(given["attention_mask"]), with_kwargs=True)
    check_parity(model, find_structure(model))
    assert seen[0].all()


def test_the_probe_leaves_training_mode_alone():
    model = tiny_model("llama").train()
    check_parity(model, find_structure(model))
    assert model.training


def test_the_probe_leaves_what_was_not_in_training_alone():
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    check_parity(model, find_structure(model))
    assert model.model.layers[1].mlp.training
    assert not model.model.layers[0].mlp.training


def test_a_model_without_decoder_layers():
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList()
    with pytest.raises(UnsupportedModelError) as error:
        find_structure(model)
    for looked_for in ("model.layers with model.norm", "transformer.h", "gpt_neox.layers", "backbone.layers"):
        assert looked_for in str(error.value)
    assert isinstance(error.value, NotImplementedError)


def test_a_model_without_head():
    model = tiny_model("llama")
    model.get_output_embeddings = lambda: None
    with pytest.raises(UnsupportedModelError, match="no output head"):
        find_structure(model)


def test_a_layer_without_a_cache_argument():
    class Layer(nn.Module):
        def forward(self, hidden_states):
            return hidden_states

    model = tiny_model("llama")
    model.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    with pytest.raises(UnsupportedModelError, match=f"takes none of {CACHE}"):
        find_structure(model)


def test_the_fingerprint_of_a_head():
    torch.manual_seed(0)
    head = nn.Linear(64, 1000, bias=False)
    own = unembed_hash(head)
    assert len(own) == 64
    assert hash_distance(own, unembed_hash(head.to(torch.bfloat16))) < 0.02
    assert hash_distance(own, unembed_hash(nn.Linear(64, 1000, bias=False))) > 0.3
    assert unembed_hash(head.to("meta")) is None
