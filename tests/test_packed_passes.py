"""A base model's own passes over packed weights, which calibration makes: the same numbers, and gates that go again."""

import pytest
import torch
from torch import nn

from tide_hf import TIDEModelForCausalLM, calibrate
from tide_hf.cpu import linear_gate, weight_forms
from tide_hf.cpu.linear_gate import LinearGate, PackedGate, packed_passes
from tide_hf.cpu.weight_forms import PackedWeight, gains_by_packing
from tide_hf.structure import find_structure

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
IDS = torch.arange(60).view(3, 20)


@pytest.fixture(autouse=True)
def _it_pays(monkeypatch):
    monkeypatch.setattr(linear_gate, "gains_by_packing", lambda dtype: dtype is torch.float32)


def forwards(model):
    return {name: module.__dict__["forward"] for name, module in model.named_modules() if "forward" in module.__dict__}


def num_linears(model):
    return sum(isinstance(module, nn.Linear) for module in model.modules())


@pytest.mark.parametrize("is_attached", [False, True])
def test_numbers_are_the_same_and_gates_go_again(tiny_llama, is_attached):
    model = tiny_llama()
    with torch.no_grad():
        expected = model(IDS).logits
    if is_attached:
        TIDEModelForCausalLM.attach(model)
    before = forwards(model)
    with torch.no_grad(), packed_passes(find_structure(model)):
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)
        gates = [gate for gate in forwards(model).values() if isinstance(gate, PackedGate)]
    assert len(gates) == num_linears(model)
    assert all(list(gate.kept) == [PackedWeight] for gate in gates)
    assert forwards(model) == before
    with pytest.raises(RuntimeError), packed_passes(find_structure(model)):
        model(IDS.float())
    assert forwards(model) == before


def test_gradients_go_through_the_plain_weights(tiny_llama):
    model = tiny_llama()
    with packed_passes(find_structure(model)):
        model(IDS).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_weights_stay_as_they_are_where_that_has_no_gain_or_no_room(tiny_llama, monkeypatch):
    with packed_passes(find_structure(model := tiny_llama().bfloat16())):
        assert not forwards(model)
    monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)
    with packed_passes(find_structure(model := tiny_llama())):
        assert not forwards(model)


@pytest.mark.parametrize(("packed", "gains"), [(1.0, True), (1.9, True), (2.1, False), (4.0, False)])
def test_only_a_clear_gain_counts(monkeypatch, packed, gains):
    monkeypatch.setattr(weight_forms, "can_pack", lambda _: True)
    monkeypatch.setattr(weight_forms, "_seconds_of", lambda form, *_: 3.0 if form is None else packed)
    assert gains_by_packing(torch.float32) == gains


def test_what_cannot_be_packed_has_no_gain():
    assert not gains_by_packing(torch.float64)


def test_calibration_reads_packed_weights(tiny_llama, tiny_tokenizer, monkeypatch):
    used = set()
    monkeypatch.setattr(
        PackedGate, "prepare", lambda self, rows, forms: used.add(self.module) or self.keep(PackedWeight)
    )
    model = tiny_llama()
    options = {"samples": 20, "max_length": 8, "exit_layers": [1, 2], "batch_size": 8, "progress": False}
    calibrate(model, tiny_tokenizer, **options)
    assert len(used) == num_linears(model)
    assert not any(isinstance(forward, LinearGate) for forward in forwards(model).values())
