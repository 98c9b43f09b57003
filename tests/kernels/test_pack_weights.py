"""The option pack_weights: which of a model's weights are packed, and when."""

import copy

import pytest
import torch
from draft_heads import draft_head_for
from drafters import HeadDrafter
from families import VOCAB
from packed_weights import set_fastest_layouts
from torch import nn

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError
from tide_hf.depth import linear_gate
from tide_hf.depth.fused_layers import FusedLayers
from tide_hf.depth.linear_gate import linear_gates

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
PROMPT = torch.arange(8)[None]
OPTIONS = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(autouse=True)
def _packed_weights_are_the_fastest(monkeypatch):
    """Whatever this machine is, and no layer runs as two kernels."""
    set_fastest_layouts(monkeypatch)
    monkeypatch.setattr(FusedLayers, "for_call", lambda _: None)


def test_the_draft_head_and_the_draft_vocabulary_are_packed(tiny_llama):
    model = tiny_llama()
    expected = model.generate(PROMPT, **OPTIONS)
    routers = draft_head_for(model)
    routers.draft_vocab = torch.arange(0, VOCAB, 2)
    for one in (copy.deepcopy(model), model):  # which share routers
        TIDEModelForCausalLM.attach(one, routers, pack_weights=True)
    model._tide.make_drafter = lambda _, texts, engine: HeadDrafter(texts, engine, (0, 2), 3)
    assert torch.equal(model.generate(PROMPT, **OPTIONS), expected)
    linears = [part for part in routers.draft_head.modules() if type(part) is nn.Linear]
    linears.append(model._tide.draft_unembed().head)
    assert all(linear.forward.converted and linear.forward.replaced is None for linear in linears)
    model.tide_release()
    assert not any(linear.forward.converted for linear in linears[:-1])
    TIDEModelForCausalLM.detach(model)
    assert not any("forward" in linear.__dict__ for linear in linears[:-1])


def has_copy(gate):
    return any(layout.is_copy for layout in gate.converted)


def test_auto_packs_nothing_where_memory_is_short(tiny_llama, monkeypatch):
    monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)
    model = tiny_llama()
    for pack_weights in ("auto", True):  # attaching again replaces the choice
        TIDEModelForCausalLM.attach(model, pack_weights=pack_weights)
        model.generate(PROMPT, max_new_tokens=96, do_sample=False)  # so long that "auto" would pack
        gates = list(linear_gates(model._tide.structure))
        assert len(gates) == 4 * 7 + 1
        assert all(has_copy(gate) == (pack_weights is True) for gate in gates)
    TIDEModelForCausalLM.attach(model, pack_weights=False)
    assert not list(linear_gates(model._tide.structure))


@pytest.mark.parametrize(
    ("settings", "lengths", "packed"),
    [
        ({}, (8, 8, 8), (False, False, False)),
        ({}, (40, 56, 8), (False, True, True)),  # 40 tokens decoded, and half of 56 expected
        ({}, (96,), (True,)),
        ({"pack_weights": True}, (1,), (True,)),
        ({"engine": "compiled"}, (1,), (True,)),
    ],
)
def test_a_first_short_answer_copies_no_weights(tiny_llama, settings, lengths, packed):
    model = TIDEModelForCausalLM.attach(tiny_llama(), **settings)
    found = []
    for length in lengths:
        model.generate(PROMPT, min_new_tokens=length, max_new_tokens=length, do_sample=False)
        found.append(any(map(has_copy, linear_gates(model._tide.structure))))
    assert tuple(found) == packed


def test_packing_is_refused_only_if_it_is_requested(tiny_llama):
    model = tiny_llama().to(torch.float64)
    with pytest.raises(UnsupportedOptionError, match=r"weights cannot be packed.*dtype=torch\.float32"):
        TIDEModelForCausalLM.attach(model, pack_weights=True)
    assert not isinstance(model, TIDEModelForCausalLM)
    assert not list(linear_gates(TIDEModelForCausalLM.attach(model)._tide.structure))
    with pytest.raises(ConfigurationError, match="unknown pack_weights"):
        TIDEModelForCausalLM.from_pretrained("nowhere", pack_weights=1)
