"""How a model's weights are read: which are copied into another layout, and from which call on."""

import copy

import pytest
import torch
from draft_heads import draft_head_for
from drafters import HeadDrafter
from families import VOCAB
from packed_weights import converted, narrow, set_fastest_layouts
from torch import nn

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError
from tide_hf.kernels.cpu.cpp_kernels import build_kernels
from tide_hf.weights import linear_gate, reading
from tide_hf.weights.fused_layers import FusedLayers
from tide_hf.weights.integers import PanelIntegers
from tide_hf.weights.layouts import PlainWeight, PrepackedWeight, UpcastWeight
from tide_hf.weights.linear_gate import KERNEL_LAYOUTS, layouts_now
from tide_hf.weights.lossless import HalfWeight, RequantizedWeight

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
PROMPT = torch.arange(8)[None]
OPTIONS = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(autouse=True)
def _packed_weights_are_the_fastest(monkeypatch):
    """Whatever this machine is, and no layer runs as two kernels."""
    set_fastest_layouts(monkeypatch)
    monkeypatch.setattr(FusedLayers, "with_limits", lambda *_: {})


def test_the_draft_head_and_the_draft_vocabulary_are_packed(tiny_llama):
    model = tiny_llama()
    expected = model.generate(PROMPT, **OPTIONS)
    routers = draft_head_for(model)
    routers.draft_vocab = torch.arange(0, VOCAB, 2)
    for one in (copy.deepcopy(model), model):  # which share routers
        TIDEModelForCausalLM.attach(one, routers, pack_weights=True)
    model._tide.make_drafter = lambda _, call, engine: HeadDrafter(call.prompts, engine, (0, 2), 3)
    assert torch.equal(model.generate(PROMPT, **OPTIONS), expected)
    linears = [part for part in routers.draft_head.modules() if type(part) is nn.Linear]
    linears.append(model._tide.draft_unembed().head)
    assert all(linear.forward.converted and linear.forward.replaced is None for linear in linears)
    model.tide_release()
    assert not any(linear.forward.converted for linear in linears[:-1])
    TIDEModelForCausalLM.detach(model)
    assert not any("forward" in linear.__dict__ for linear in linears[:-1])


@pytest.mark.parametrize("has_kernels", [False, True])
def test_auto_copies_nothing_where_memory_is_short(tiny_llama, monkeypatch, fresh_kernels, has_kernels):
    monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)
    if has_kernels:
        build_kernels(torch.float32)
        set_fastest_layouts(monkeypatch, order=(HalfWeight, PlainWeight, None))
    model = narrow(tiny_llama(), "bfloat16")
    for pack_weights in ("auto", True):  # attaching again replaces the choice
        TIDEModelForCausalLM.attach(model, pack_weights=pack_weights)
        model.generate(PROMPT, max_new_tokens=96, do_sample=False)  # so long that "auto" would copy
        copies = HalfWeight if has_kernels else PrepackedWeight
        other = {PlainWeight} if has_kernels else set()
        gates = model._tide.weights.gates()
        assert len(gates) == 4 * 7 + 1
        assert all((copies in gate.converted) == (pack_weights is True) for gate in gates)
        assert converted(model) == ({copies} if pack_weights is True else other)
    TIDEModelForCausalLM.attach(model, pack_weights=False)
    assert not model._tide.weights.gates()


@pytest.mark.parametrize(
    ("settings", "lengths", "packed"),
    [
        ({}, (40, 56, 8), (False, True, True)),  # 40 tokens decoded, and half of 56 expected
        ({"pack_weights": True}, (1,), (True,)),
        ({"engine": "compiled"}, (1,), (True,)),
    ],
)
def test_a_first_short_answer_copies_no_weights(tiny_llama, settings, lengths, packed):
    model = TIDEModelForCausalLM.attach(tiny_llama(), **settings)
    found = []
    for length in lengths:
        model.generate(PROMPT, min_new_tokens=length, max_new_tokens=length, do_sample=False)
        found.append(any(layout.is_copy for layout in converted(model)))
    assert tuple(found) == packed


def test_a_layout_is_allowed_in_calls_that_decode_as_many_tokens_as_it_pays_after(tiny_llama, monkeypatch):
    monkeypatch.setattr(reading, "are_ready", lambda _: True)
    weights = TIDEModelForCausalLM.attach(tiny_llama())._tide.weights

    def allowed(engine, max_new_tokens):
        with weights.in_call(engine, max_new_tokens):
            return set(layouts_now())

    free, every = {PlainWeight, UpcastWeight}, set(KERNEL_LAYOUTS)
    assert allowed("eager", 23) == free  # of which half are expected
    assert allowed("eager", 24) == free | {HalfWeight, PanelIntegers}
    assert allowed("eager", 127) == every - {RequantizedWeight}
    assert allowed("eager", 128) == allowed("compiled", 1) == every
    weights.add_decoded(16)
    assert allowed("eager", 0) == free | {HalfWeight, PanelIntegers}
    assert allowed("eager", 96) == every
    weights.copies_at_once = True
    assert allowed("eager", 0) == every


def test_packing_is_refused_only_if_it_is_requested(tiny_llama):
    model = tiny_llama().to(torch.float64)
    with pytest.raises(UnsupportedOptionError, match=r"weights cannot be packed.*dtype=torch\.float32"):
        TIDEModelForCausalLM.attach(model, pack_weights=True)
    assert not isinstance(model, TIDEModelForCausalLM)
    assert not TIDEModelForCausalLM.attach(model)._tide.weights.gates()
    with pytest.raises(ConfigurationError, match="unknown pack_weights"):
        TIDEModelForCausalLM.from_pretrained("nowhere", pack_weights=1)
