"""Linear layers that read weights in other layouts: the same products, never of weights that have changed since."""

import copy

import pytest
import torch
from packed_weights import narrow, set_fastest_layouts
from recorded import Recording
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tide_hf import TIDEModelForCausalLM
from tide_hf.depth.gates import LayerRun, active
from tide_hf.weights import layouts as weight_layouts
from tide_hf.weights import linear_gate
from tide_hf.weights.layouts import (
    WEIGHT_LAYOUTS,
    PlainWeight,
    PrepackedWeight,
    QuantizedWeight,
    UpcastWeight,
)
from tide_hf.weights.linear_gate import DRAFT_LAYOUTS, KERNEL_LAYOUTS, LinearGate, allowed_layouts
from tide_hf.weights.lossless import HalfWeight, RequantizedWeight

PACKED_DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if weight_layouts.can_pack(dtype)]
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def _packed_is_faster(monkeypatch):
    """Whatever this machine is."""
    set_fastest_layouts(monkeypatch, PACKED_DTYPES)


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


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("layout", [PrepackedWeight, PlainWeight])
def test_the_output_is_the_layers_for_any_number_of_rows(attached, dtype, layout, monkeypatch):
    set_fastest_layouts(monkeypatch, PACKED_DTYPES, order=(layout, None), except_rows=64)
    atol = 1e-5 if dtype is torch.float32 else 1e-2
    for rows in (1, 3, 64, 300):
        linear = make_linear(112, 65, bias=rows != 3).to(dtype)
        for state in (torch.randn(1, rows, 112).to(dtype), torch.randn(rows, 2, 112).to(dtype)[:, :1]):
            with allowed_layouts(KERNEL_LAYOUTS):
                found = linear(state)
            assert found.is_contiguous()
            torch.testing.assert_close(found, linear.forward.native(state), atol=atol, rtol=atol)
        assert list(linear.forward.converted) == ([] if rows == 64 else [layout])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_onednn", [True, False])
def test_weights_without_fast_products_are_upcast_in_chunks(attached, dtype, has_onednn, monkeypatch):
    set_fastest_layouts(monkeypatch, [dtype], order=(UpcastWeight, None))
    monkeypatch.setattr(weight_layouts, "UPCAST_CHUNK", 100)
    monkeypatch.setattr(weight_layouts, "can_pack", lambda dtype: has_onednn and dtype is torch.float32)
    linear = make_linear(30, 33, bias=True).to(dtype)
    for rows in (1, 70):
        state = torch.randn(rows, 2, 30).to(dtype)[:, :1]
        exact = nn.functional.linear(state.double(), linear.weight.double(), linear.bias.double())
        torch.testing.assert_close(linear(state), exact.to(dtype), atol=1e-2, rtol=1e-2)
    assert list(linear.forward.converted) == [UpcastWeight]
    pair = [torch.randn(size, 30).to(dtype) for size in (9, 4)]
    together = UpcastWeight(*pair).apply(state, None)
    torch.testing.assert_close(together, nn.functional.linear(state, torch.cat(pair)), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_draft_steps_read_quantised_weights(attached, dtype):
    linear, state = make_linear(112, 65, True).to(dtype), torch.randn(2, 1, 112).to(dtype)
    with torch.no_grad():
        linear.weight[-1] = 0.0
    with allowed_layouts(DRAFT_LAYOUTS):
        found = linear(state)
    assert list(linear.forward.converted) == [QuantizedWeight]
    assert found.dtype is dtype
    native = linear.forward.native(state)
    # Half a quantisation step of 1/127 for each input; then rounding of states and outputs to bfloat16.
    largest = 0.5 / 127 * linear.weight.abs().amax() * state.abs().sum(dim=-1).amax()
    assert 0 < float((found - native).abs().max()) <= float(largest + 0.02 * native.abs().max())
    with allowed_layouts(KERNEL_LAYOUTS):  # as verify passes do
        torch.testing.assert_close(linear(state), native, atol=1e-2, rtol=1e-2)


def test_models_that_share_a_weight_share_its_copy(attached):
    linear = make_linear(32, 32, bias=False)
    other = nn.Linear(32, 32, bias=False)
    other.weight = linear.weight
    other.forward = LinearGate(other)
    state = torch.randn(5, 32)
    assert torch.equal(linear(state), other(state))
    assert linear.forward.converted == other.forward.converted != {}
    linear.forward.release()
    assert torch.equal(other(state), linear(state))


@pytest.mark.parametrize("layout", range(len(WEIGHT_LAYOUTS)))
def test_the_op_is_the_plain_product_for_weights_without_a_layout(layout):
    state, weight, bias = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)
    plain = nn.functional.linear(state, weight, bias)
    assert torch.equal(torch.ops.tide_hf.linear(state, [weight], bias, layout), plain)


def test_a_parametrised_bias_is_added_and_a_parametrised_weight_left_to_the_layer(attached):
    linear, state = make_linear(32, 32, bias=True), torch.randn(5, 32)
    before = linear(state)
    assert linear.forward.converted
    parametrize.register_parametrization(linear, "bias", nn.Hardtanh(3.0, 4.0))
    torch.testing.assert_close(linear(state), before + linear.bias - linear.parametrizations.bias.original)
    parametrizations.weight_norm(linear)
    linear.forward.release_if_changed()
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(2.0)
    assert torch.equal(linear(state), nn.functional.linear(state, linear.weight, linear.bias))
    assert not linear.forward.converted


def test_no_weights_are_packed_outside_tides_passes_or_under_autocast(attached):
    linear = make_linear(16, 16, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.randn(2, 16)).dtype is torch.bfloat16
    with active(None):
        linear(torch.randn(5, 16))
    with torch.enable_grad():
        linear(torch.randn(5, 16)).sum().backward()
    linear(torch.randn(0, 16))
    assert not linear.forward.converted
    assert linear.weight.grad is not None


@pytest.mark.parametrize("layout", [PrepackedWeight, PlainWeight])
def test_changed_weights_are_read_in_the_next_pass(attached, monkeypatch, layout):
    set_fastest_layouts(monkeypatch, order=(layout, None))
    linear, state = make_linear(32, 32, bias=False), torch.randn(5, 32)
    with allowed_layouts(KERNEL_LAYOUTS):
        linear(state)
        linear.weight = nn.Parameter(torch.randn(32, 32))
        torch.testing.assert_close(linear(state), linear.forward.native(state), atol=1e-5, rtol=1e-5)
        linear.weight.mul_(2.0)
        torch.testing.assert_close(linear(state), linear.forward.native(state), atol=1e-5, rtol=1e-5)
        before = linear(state)
        linear.weight.data = torch.randn(32, 32)  # the old values have no other owner
        torch.testing.assert_close(linear.forward.converted[layout].apply(state, None), before)


@pytest.mark.parametrize("layout", [PrepackedWeight, HalfWeight, RequantizedWeight])
def test_a_weight_that_cannot_be_converted_is_tried_again_once_it_has_changed(monkeypatch, caplog, layout):
    linear, memory = nn.Linear(32, 32), 2**50
    gate, convert = LinearGate(linear), layout._convert
    monkeypatch.setattr(linear_gate, "fastest_layout", lambda _, __, layouts, *_of: next(iter(layouts), None))
    if layout is PrepackedWeight:  # other weights lack values that the layout can hold
        monkeypatch.setattr(layout, "_convert", lambda *_: torch.empty(memory))
    assert gate.prepare(1, (layout,)) is None
    assert len(caplog.records) == (layout is PrepackedWeight)
    monkeypatch.setattr(layout, "_convert", lambda *_: pytest.fail("tried again"))
    assert gate.prepare(1, (layout,)) is None
    monkeypatch.setattr(layout, "_convert", convert)
    narrow(linear, "integers" if layout is RequantizedWeight else "bfloat16")
    assert isinstance(gate.prepare(1, (layout,)), layout)


def test_a_stored_choice_holds_in_tides_passes_without_gradients_only(attached):
    linear, state = make_linear(16, 16, bias=True), torch.randn(5, 16)
    with allowed_layouts(KERNEL_LAYOUTS, cache_choice=True):
        with Recording():  # which would store a call of the op
            linear(state)
        assert not linear_gate._products.get()
        expected = linear(state)
        linear.forward.prepare = pytest.fail
        assert torch.equal(linear(state), expected)
        linear_gate._products.get()[linear.forward, state.numel()] = pytest.fail
        for context in (active(None), torch.enable_grad()):
            with context:
                linear(state)


def test_copied_and_released_models_have_no_copies_and_detached_ones_no_gates(attached):
    attached(input_ids=torch.arange(8)[None])
    gates, twin = attached._tide.weights.gates(), copy.deepcopy(attached)
    assert all(gate.converted for gate in gates)
    twins = twin._tide.weights.gates()
    assert twins[0].module is twin.model.layers[0].self_attn.q_proj
    attached.tide_release()
    assert not any(gate.converted for gate in (*gates, *twins))
    TIDEModelForCausalLM.detach(attached)
    assert not any("forward" in module.__dict__ for module in attached.modules())
