"""Drafts on quantised weights: no verify pass reads them, so that tokens stay the base model's."""

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_drafter, use_heads
from families import tiny_model
from on_steps import LAYERS, NEW, OPTIONS, linear_heads, prompts
from packed_weights import attach_packed, set_fastest_layouts
from torch import nn

from tide_hf import TIDEModelForCausalLM
from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES
from tide_hf.weights import layouts as weight_layouts
from tide_hf.weights.layouts import QuantizedWeight
from tide_hf.weights.panels import LayoutError

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def _it_pays(monkeypatch):
    """Whatever this machine is, packed weights are the faster ones, and quantised ones are faster still."""
    set_fastest_layouts(monkeypatch)


@pytest.fixture
def applied(monkeypatch):
    """The shapes of what was multiplied by quantised weights, in traces and outside; they hold other values."""
    shapes, take, apply = [], QuantizedWeight._convert, QuantizedWeight.apply

    def scrambled(self, weights):
        take(self, weights)
        self.values = self.values.flip(0).contiguous()

    def applied(self, input, bias):
        shapes.append(tuple(input.shape))
        return apply(self, input, bias)

    monkeypatch.setattr(QuantizedWeight, "_convert", scrambled)
    monkeypatch.setattr(QuantizedWeight, "apply", applied)
    return shapes


def attach_with(kind, model):
    steps = attach_packed(model, draft_head_for(model) if kind == "draft head" else linear_heads(model))
    use_heads(model, 0 if kind == "draft head" else 3)
    return steps


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("linear", family) for family in ("llama", "gpt2", "falcon")),
        *(("draft head", family) for family in ("llama", "bloom", "gemma2")),
    ],
)
def test_tokens_are_the_base_models_whatever_drafts_read(family, kind, applied):
    model = tiny_model(family)
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach_with(kind, model)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.refused is None
    assert applied
    assert {shape[-2] if len(shape) > 2 else shape[0] for shape in applied} == {1}  # a draft's width


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_the_gemm_multiplies_by_the_dequantised_weights(on_some_cpu, dtype):
    torch.manual_seed(0)
    for size, size_out in [(576, 576), (576, 190), (64, 3), (100, 37), (8, 2), (1152, 9)]:
        weight = torch.randn(size_out, size).to(dtype)
        weight[-1] = 0.0
        layout = QuantizedWeight(weight)
        integers = layout.values.transpose(1, 2).flatten(2).flatten(0, 1).double()
        exact = (integers * layout.scales.double()[:, None])[:size_out]
        torch.testing.assert_close(exact.float(), weight.float(), atol=0.025, rtol=0.0)
        for rows in (1, 3, 8):
            state = torch.randn(rows, size).to(dtype)
            for bias in (None, torch.randn(size_out).to(dtype)):
                expected = nn.functional.linear(state.double(), exact, None if bias is None else bias.double())
                error = (layout.apply(state, bias).double() - expected).abs().max()
                assert float(error) <= 6e-3 * float(expected.abs().max())  # states may be rounded to bfloat16
    with pytest.raises(LayoutError):  # panels hold four columns next to each other
        QuantizedWeight(torch.randn(2, 6).to(dtype))


def test_steps_survive_eager_calls_and_are_released(tiny_llama):
    model = tiny_llama(num_hidden_layers=LAYERS)
    steps = attach_with("linear", model)
    model.generate(**prompts(), **OPTIONS)
    made, weights = steps.warm_up.num_prepared, [model.model.layers[0].mlp.up_proj.weight]
    key = weight_layouts._key_of(weights, QuantizedWeight)
    assert any(set(key) <= set(known) for known in weight_layouts._known)
    model.generate(**prompts(), **OPTIONS, tide_engine="eager")
    model.generate(**prompts(), **OPTIONS)
    assert steps.warm_up.num_prepared == made
    model.tide_release()
    assert not any(gate.converted for gate in model._tide.weights.gates())
    assert not any(set(key) <= set(known) for known in weight_layouts._known)


def test_nothing_is_quantised_without_drafts(tiny_llama, applied):
    model = tiny_llama(num_hidden_layers=LAYERS)
    attach_packed(model)
    use_drafter(model, "random", [[5] * NEW], width=4)
    model.generate(**prompts(), **OPTIONS)
    assert not applied
    TIDEModelForCausalLM.detach(model)
