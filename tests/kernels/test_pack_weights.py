"""The option pack_weights: which of a model's weights are packed, when, and for how long."""

import copy
from collections import Counter

import pytest
import torch
from block_heads import routers_for
from drafters import HeadDrafter
from families import VOCAB
from packed_weights import let_pay
from torch import nn

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError
from tide_hf.depth import linear_gate
from tide_hf.depth.linear_gate import LinearGate, linear_gates

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
PROMPT = torch.arange(8)[None]
OPTIONS = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(autouse=True)
def _it_pays(monkeypatch):
    """Whatever this machine is, packed weights are the faster ones."""
    let_pay(monkeypatch)


def test_the_block_and_the_draft_vocabulary_are_packed_as_well(tiny_llama):
    model = tiny_llama()
    expected = model.generate(PROMPT, **OPTIONS)
    routers = routers_for(model, 1)
    routers.draft_vocab = torch.arange(0, VOCAB, 2)
    for _ in range(2):  # of models that share routers
        TIDEModelForCausalLM.attach(copy.deepcopy(model), routers)
    TIDEModelForCausalLM.attach(model, routers)
    model._tide.make_drafter = lambda _, texts, engine: HeadDrafter(texts, engine, 1, 3)
    assert torch.equal(model.generate(PROMPT, **OPTIONS), expected)
    linears = [part for part in routers.block.head.modules() if type(part) is nn.Linear]
    linears.append(model._tide.draft_unembed().head)
    assert all(linear.forward.converted and linear.forward.replaced is None for linear in linears)
    model.tide_release()
    assert not any(linear.forward.converted for linear in linears[:-1])
    TIDEModelForCausalLM.detach(model)
    assert not any("forward" in linear.__dict__ for linear in linears[:-1])


def test_generate_notices_an_adapter_that_was_merged(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    before = model.generate(PROMPT, **OPTIONS)
    assert any(gate.converted for gate in linear_gates(model._tide.structure))
    for gate in linear_gates(model._tide.structure):
        gate.module.weight.data.mul_(-1.0)
    after = model.generate(PROMPT, **OPTIONS)
    assert not torch.equal(before, after)
    assert torch.equal(after, TIDEModelForCausalLM.detach(model).generate(PROMPT, **OPTIONS))


@pytest.mark.parametrize("tide_mode", ["self_speculative", "early_exit"])
def test_a_layer_chooses_once_a_call_for_each_number_of_rows(tiny_llama, monkeypatch, tide_mode):
    asked, prepare = Counter(), LinearGate.prepare

    def counting(gate, rows, layouts):
        asked[gate, rows] += 1
        return prepare(gate, rows, layouts)

    monkeypatch.setattr(LinearGate, "prepare", counting)
    model = tiny_llama()
    TIDEModelForCausalLM.attach(model, routers_for(model, 1))
    for _ in range(2):
        model.generate(PROMPT, tide_mode=tide_mode, **OPTIONS)
        assert {gate for gate, _ in asked} >= set(linear_gates(model._tide.structure))
        assert set(asked.values()) == {1}
        asked.clear()  # weights may be others in the next call


def test_attaching_again_keeps_the_choice_of_the_last_call(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    count = len(list(linear_gates(model._tide.structure)))
    assert count == 4 * 7 + 1
    TIDEModelForCausalLM.attach(model, pack_weights=True)
    assert len(list(linear_gates(model._tide.structure))) == count
    TIDEModelForCausalLM.attach(model, pack_weights=False)
    assert not list(linear_gates(model._tide.structure))


def test_auto_leaves_a_full_memory_alone(tiny_llama, monkeypatch):
    monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)
    for pack_weights in ("auto", True):
        model = TIDEModelForCausalLM.attach(tiny_llama(), pack_weights=pack_weights)
        model.generate(PROMPT, **OPTIONS)
        gates = list(linear_gates(model._tide.structure))
        assert gates
        assert all(bool(gate.converted) == (pack_weights is True) for gate in gates)


def test_what_cannot_be_packed_is_refused_only_if_asked_for(tiny_llama):
    model = tiny_llama().to(torch.float64)
    with pytest.raises(UnsupportedOptionError, match=r"weights cannot be packed.*dtype=torch\.float32"):
        TIDEModelForCausalLM.attach(model, pack_weights=True)
    assert not isinstance(model, TIDEModelForCausalLM)
    assert not list(linear_gates(TIDEModelForCausalLM.attach(model)._tide.structure))


def test_an_unknown_choice_is_refused(tiny_llama):
    with pytest.raises(ConfigurationError, match="unknown pack_weights"):
        TIDEModelForCausalLM.attach(tiny_llama(), pack_weights="sometimes")
    with pytest.raises(ConfigurationError, match="unknown pack_weights"):
        TIDEModelForCausalLM.from_pretrained("nowhere", pack_weights=1)
