"""A base model's own passes with weights in another layout, as calibration runs them: the same logits."""

import pytest
import torch
from torch import nn

from tide_hf import TIDEModelForCausalLM, calibrate
from tide_hf.base_model.structure import find_structure
from tide_hf.weights import linear_gate
from tide_hf.weights.layouts import PrepackedWeight, UpcastWeight
from tide_hf.weights.linear_gate import LinearGate, SingleLayoutGate, faster_passes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
IDS = torch.arange(60).view(3, 20)


@pytest.fixture(autouse=True)
def _it_pays(monkeypatch):
    layouts = {torch.float32: PrepackedWeight, torch.float16: UpcastWeight}
    monkeypatch.setattr(linear_gate, "clearly_faster_layout", layouts.get)


def forwards(model):
    return {name: module.__dict__["forward"] for name, module in model.named_modules() if "forward" in module.__dict__}


def num_linears(model):
    return sum(isinstance(module, nn.Linear) for module in model.modules())


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize(
    ("dtype", "layout", "tolerance"), [(torch.float32, PrepackedWeight, 1e-5), (torch.float16, UpcastWeight, 2e-2)]
)
def test_logits_stay_and_gates_are_removed(tiny_llama, is_attached, dtype, layout, tolerance):
    model = tiny_llama().to(dtype)
    with torch.no_grad():
        expected = model(IDS).logits
    if is_attached:
        TIDEModelForCausalLM.attach(model)
    before = forwards(model)
    with torch.no_grad(), faster_passes(find_structure(model)):
        torch.testing.assert_close(model(IDS).logits, expected, atol=tolerance, rtol=tolerance)
        gates = [gate for gate in forwards(model).values() if isinstance(gate, SingleLayoutGate)]
    assert len(gates) == num_linears(model)
    assert all(list(gate.converted) == [layout] for gate in gates)
    assert forwards(model) == before
    with pytest.raises(RuntimeError), faster_passes(find_structure(model)):
        model(IDS.float())
    assert forwards(model) == before
    with faster_passes(find_structure(model)):  # gradients pass through the plain weights
        model(IDS).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_weights_stay_as_they_are_where_that_has_no_gain_or_no_room(tiny_llama, monkeypatch):
    with faster_passes(find_structure(model := tiny_llama().bfloat16())):
        assert not forwards(model)
    monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)
    with faster_passes(find_structure(model := tiny_llama())):
        assert not forwards(model)
    with faster_passes(find_structure(model := tiny_llama().half())):  # for which no room is needed
        assert forwards(model)


def test_calibration_runs_them(tiny_llama, tiny_tokenizer, monkeypatch):
    used = set()
    monkeypatch.setattr(
        SingleLayoutGate, "prepare", lambda self, *_: used.add(self.module) or self.convert(PrepackedWeight)
    )
    model = tiny_llama()
    options = {"samples": 20, "max_length": 8, "exit_layers": [1, 2], "batch_size": 8, "progress": False}
    calibrate(model, tiny_tokenizer, **options)
    assert len(used) == num_linears(model)
    assert not any(isinstance(forward, LinearGate) for forward in forwards(model).values())
