"""Linear layers over a handful of rows: the same numbers, and never from weights that are no longer the model's."""

import copy

import pytest
import torch
from torch import nn

from tide_hf import TIDEModelForCausalLM, packed_linear
from tide_hf.errors import ConfigurationError, UnsupportedOptionError
from tide_hf.packed_linear import FEWEST_ROWS, PACKED_ROWS, TRANSPOSED_ROWS, LinearGate, linear_gates
from tide_hf.skipping import LayerRun, active

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch has no MKL")


@pytest.fixture
def attached(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    with torch.no_grad(), active(LayerRun(model._tide.structure)):
        yield model


def make_linear(size_in, size_out, bias):
    torch.manual_seed(0)
    linear = nn.Linear(size_in, size_out, bias=bias)
    linear.forward = LinearGate(linear)
    return linear


@pytest.mark.parametrize("rows", [1, 3, FEWEST_ROWS, 5, PACKED_ROWS, PACKED_ROWS + 1, TRANSPOSED_ROWS, 60])
@pytest.mark.parametrize(("size_in", "size_out", "bias"), [(1, 3, True), (127, 65, False), (64, 33, True)])
def test_any_number_of_rows_gives_what_the_layer_gives(attached, rows, size_in, size_out, bias):
    linear = make_linear(size_in, size_out, bias)
    for state in (torch.randn(1, rows, size_in), torch.randn(rows, 2, size_in)[:, :1]):
        native = linear.forward.native(state)
        assert linear(state).shape == native.shape
        torch.testing.assert_close(linear(state), native, atol=1e-5, rtol=1e-5)
    assert (linear.forward._packed is not None) == (FEWEST_ROWS <= rows <= PACKED_ROWS)


def test_outside_tide_s_passes_nothing_is_packed(attached):
    linear = make_linear(16, 16, bias=True)
    with active(None):
        linear(torch.randn(5, 16))
    with torch.enable_grad():
        linear(torch.randn(5, 16)).sum().backward()
    linear(torch.randn(0, 16))
    assert linear.forward._packed is None
    assert linear.weight.grad is not None


@pytest.mark.parametrize("change", ["replaced", "in place", "data"])
def test_changed_weights_are_packed_anew(attached, change):
    linear, state = make_linear(32, 32, bias=False), torch.randn(5, 32)
    linear(state)
    if change == "replaced":
        linear.weight = nn.Parameter(torch.randn(32, 32))
    elif change == "in place":
        linear.weight.mul_(2.0)
    else:
        linear.weight.data.add_(1.0)  # as merging an adapter does; its version does not tell
        linear.forward.release_if_changed()
    torch.testing.assert_close(linear(state), linear.forward.native(state), atol=1e-5, rtol=1e-5)


def test_generate_notices_an_adapter_that_was_merged(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    prompt = torch.arange(8)[None]  # eight rows: the prompt's own pass uses packed weights
    options = {"max_new_tokens": 8, "do_sample": False}
    before = model.generate(prompt, **options)
    assert any(gate._packed is not None for gate in linear_gates(model._tide.structure))
    for gate in linear_gates(model._tide.structure):
        gate.module.weight.data.mul_(-1.0)
    after = model.generate(prompt, **options)
    assert not torch.equal(before, after)
    assert torch.equal(after, TIDEModelForCausalLM.detach(model).generate(prompt, **options))


def test_a_copy_packs_its_own_weights(attached):
    attached(input_ids=torch.arange(8)[None])
    twin = copy.deepcopy(attached)
    gates = list(linear_gates(twin._tide.structure))
    assert gates
    assert all(gate._packed is None for gate in gates)
    assert gates[0].module is twin.model.layers[0].self_attn.q_proj


def test_release_gives_the_memory_back_and_detach_the_layers(attached):
    attached(input_ids=torch.arange(8)[None])
    gates = list(linear_gates(attached._tide.structure))
    assert all(gate._packed is not None for gate in gates)
    attached.tide_release()
    assert all(gate._packed is None for gate in gates)
    TIDEModelForCausalLM.detach(attached)
    assert not any("forward" in module.__dict__ for module in attached.modules())


def test_attaching_again_keeps_the_choice_of_the_last_call(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    count = len(list(linear_gates(model._tide.structure)))
    assert count == 4 * 7 + 1
    TIDEModelForCausalLM.attach(model, pack_weights=True)
    assert len(list(linear_gates(model._tide.structure))) == count
    TIDEModelForCausalLM.attach(model, pack_weights=False)
    assert not list(linear_gates(model._tide.structure))


def test_auto_leaves_a_full_memory_alone(tiny_llama, monkeypatch):
    monkeypatch.setattr(packed_linear, "MEMORY_SHARE", 0.0)
    assert not list(linear_gates(TIDEModelForCausalLM.attach(tiny_llama())._tide.structure))
    assert list(linear_gates(TIDEModelForCausalLM.attach(tiny_llama(), pack_weights=True)._tide.structure))


def test_what_cannot_be_packed_is_refused_only_if_asked_for(tiny_llama):
    model = tiny_llama().to(torch.bfloat16)
    with pytest.raises(UnsupportedOptionError, match=r"weights cannot be packed.*dtype=torch\.float32"):
        TIDEModelForCausalLM.attach(model, pack_weights=True)
    assert not isinstance(model, TIDEModelForCausalLM)
    assert not list(linear_gates(TIDEModelForCausalLM.attach(model)._tide.structure))


def test_an_unknown_choice_is_refused(tiny_llama):
    with pytest.raises(ConfigurationError, match="unknown pack_weights"):
        TIDEModelForCausalLM.attach(tiny_llama(), pack_weights="sometimes")
    with pytest.raises(ConfigurationError, match="unknown pack_weights"):
        TIDEModelForCausalLM.from_pretrained("nowhere", pack_weights=1)
