"""Weights that another package has quantised to integers: found, multiplied as they are stored, and followed."""

import pytest
import torch
from drafters import use_drafter
from on_steps import LAYERS, OPTIONS, as_traced, new_tokens, prompts, use_steps
from quantized_weights import quantized
from torch import nn
from torch.nn import functional

from tide_hf import TIDEModelForCausalLM
from tide_hf.depth.linear_gate import IntegerGate, linear_gates
from tide_hf.engines.steps.step_store import CompiledSteps
from tide_hf.kernels.cpu.cpp_kernels import DTYPES, build_kernels
from tide_hf.kernels.cpu.integer_weights import MAX_FLOAT_ROWS, MAX_ROWS, IntegerWeight, integers_of

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def quantize(model):
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight = quantized(module.weight)
    return model


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_scaled_integers_and_round_alike_for_any_number_of_rows(dtype):
    for size, size_out in ((576, 192), (40, 7), (5000, 33), (3, 2)):
        integers, scales = torch.randint(-128, 128, (size_out, size), dtype=torch.int8), torch.rand(size_out, 1)
        layout = IntegerWeight(integers, scales)
        for rows in (*range(1, 10), 21):
            state, bias = torch.randn(rows, size).to(dtype), torch.randn(size_out).to(dtype)
            exact = functional.linear(state.double(), integers * scales.double(), bias.double())
            found = layout.apply(state, bias)
            assert float((found.double() - exact).abs().max()) <= ROUNDING[dtype] * float(exact.abs().max())
            assert torch.equal(found, torch.cat([layout.apply(row, bias) for row in state.split(1)]))


def linear(package="torchao", **attributes):
    found = nn.Linear(6, 4)
    found.weight = quantized(found.weight, package)
    for name, value in attributes.items():
        setattr(found.weight, name, value)
    return found


@pytest.mark.parametrize("package", ["torchao", "optimum"])
def test_integers_and_scales_are_the_packages_own_tensors(package):
    layer = linear(package)
    integers, scales = integers_of(layer)
    assert integers is layer.weight.qdata
    assert scales is layer.weight.scale
    assert integers_of(linear(package, scale=torch.rand(4, 2), _scale=torch.rand(4, 2))) is None  # two per row
    assert integers_of(linear(package, qdata=torch.rand(4, 6), _data=torch.rand(4, 6))) is None  # 8 bits, floating
    meta = torch.empty(4, 6, dtype=torch.int8, device="meta")
    assert integers_of(linear(package, qdata=meta, _data=meta)) is None
    assert integers_of(nn.Linear(6, 4)) is None
    assert integers_of(linear("elsewhere")) is None


def test_layers_that_quantise_their_input_or_have_zero_points_are_left_alone():
    assert integers_of(linear(zero_point=torch.zeros(4, 1))) is not None
    assert integers_of(linear(zero_point=torch.ones(4, 1))) is None
    assert integers_of(linear(act_quant_kwargs=object())) is None
    assert integers_of(linear(activation_quantization="asymmetric")) is None
    assert integers_of(linear("optimum", axis=1)) is None
    layer = linear("optimum")
    layer.activation_qtype = "qint8"
    assert integers_of(layer) is None


@pytest.fixture
def products(monkeypatch):
    """The numbers of rows of products with integers, outside compiled graphs."""
    seen, apply = [], IntegerWeight.apply

    def counted(self, input, bias):
        seen.append(input.numel() // input.shape[-1])
        return apply(self, input, bias)

    monkeypatch.setattr(IntegerWeight, "apply", counted)
    return seen


def attach(model, engine="eager"):
    build_kernels(torch.float32)
    TIDEModelForCausalLM.attach(model, engine=engine, remembered_tokens=0)
    use_steps(model, CompiledSteps(as_traced))


def integer_gates(model):
    return [gate for gate in linear_gates(model._tide.structure) if isinstance(gate, IntegerGate)]


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_tokens_are_the_quantised_models(tiny_llama, products, engine):
    model = quantize(tiny_llama(num_hidden_layers=LAYERS))
    expected = model.generate(**prompts(), **OPTIONS)
    attach(model, engine)
    use_drafter(model, "right", new_tokens(expected), width=4)
    assert len(integer_gates(model)) == 7 * LAYERS
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert products
    TIDEModelForCausalLM.detach(model)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)


def test_many_rows_and_models_without_kernels_take_the_packages_own_product(tiny_llama, products):
    model = quantize(tiny_llama(num_hidden_layers=LAYERS))
    batch = prompts(length=MAX_FLOAT_ROWS + 1)
    expected = model.generate(**batch, **OPTIONS)
    attach(model)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert max(products) <= MAX_ROWS  # of verify passes; the prompt's rows are not among them
    products.clear()
    TIDEModelForCausalLM.detach(model)
    TIDEModelForCausalLM.attach(model, use_kernels=False)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert products == []


@pytest.mark.parametrize("change", ["scales", "integers", "weight"])
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_changed_weights_are_followed(tiny_llama, products, engine, change):
    model = quantize(tiny_llama(num_hidden_layers=LAYERS))
    attach(model, engine)
    before = model.generate(**prompts(), **OPTIONS)
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        if change == "weight":
            layer.self_attn.v_proj.weight = quantized(-3.0 * weight.qdata * weight.scale)
        else:
            (weight.scale if change == "scales" else weight.qdata).mul_(-1)
    after = model.generate(**prompts(), **OPTIONS)
    assert not torch.equal(after, before)
    assert products
    assert torch.equal(after, TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS))
