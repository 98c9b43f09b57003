"""Weights that another package has quantised to integers: found, multiplied as they are stored, and followed."""

import pytest
import torch
from drafters import use_drafter
from on_steps import LAYERS, OPTIONS, as_traced, new_tokens, prompts, use_steps
from quantized_weights import KINDS, packed_int4, quantize, quantized, scaled
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from tide_hf import TIDEModelForCausalLM
from tide_hf.depth.fused_layers import FusedLayer, Probe
from tide_hf.depth.linear_gate import IntegerGate, linear_gates
from tide_hf.engines.steps.step_store import CompiledSteps
from tide_hf.kernels.cpu.cpp_kernels import DTYPES, build_kernels, load_op
from tide_hf.kernels.cpu.integer_weights import MAX_FLOAT_ROWS, MAX_ROWS, IntegerWeight, integers_of

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}  # what int4 products have to be of


def check_products(layout, exact_weight, dtype):
    size_out, size = exact_weight.shape
    for rows in (*range(1, 10), 21):
        state, bias = torch.randn(rows, size).to(dtype), torch.randn(size_out).to(dtype)
        exact = functional.linear(state.double(), exact_weight, bias.double())
        found = layout.apply(state, bias)
        assert float((found.double() - exact).abs().max()) <= ROUNDING[dtype] * float(exact.abs().max())
        assert torch.equal(found, torch.cat([layout.apply(row, bias) for row in state.split(1)]))


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_scaled_integers_and_round_alike_for_any_number_of_rows(dtype):
    torch.manual_seed(0)
    for size, size_out, groups in ((576, 192, 18), (5000, 33, 1), (48, 7, 3), (96, 5, 1), (40, 7, 1), (3, 2, 1)):
        integers, scales = torch.randint(-128, 128, (size_out, size), dtype=torch.int8), torch.rand(size_out, groups)
        wide = integers.double(), scales.double()
        check_products(IntegerWeight(integers, scales), scaled(*wide, torch.zeros(())), dtype)
        if size % (16 * groups) == 0:
            zeros = torch.randint(-128, 128, (size_out, groups), dtype=torch.int8)
            check_products(IntegerWeight(integers, scales, zeros), scaled(*wide, -(zeros * scales.double())), dtype)


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_products_are_those_of_the_scaled_integers(dtype):
    torch.manual_seed(0)
    for size, size_out, group in ((576, 192, 32), (128, 64, 128), (512, 128, 16)):
        integers, scales = torch.randint(-8, 8, (size_out, size)), torch.rand(size // group, size_out, 2)
        exact = scaled(integers.double(), *scales.double().permute(2, 1, 0))
        check_products(IntegerWeight(packed_int4(integers), scales), exact, dtype)


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", [torch.float32])
def test_int4_is_read_where_pytorch_packs_it_in_the_kernels_way(dtype):
    integers = torch.randint(-8, 8, (64, 32))
    of_pytorch = torch.ops.aten._convert_weight_to_int4pack_for_cpu((integers + 8).int(), 1)
    is_read = torch.equal(of_pytorch, packed_int4(integers))
    assert load_op("skinny_gemm", dtype) is not None
    with FakeTensorMode():  # first asked in a trace
        assert IntegerWeight.serves(dtype, 1, torch.uint8) == is_read


def linear(package="torchao", kind="rows", sizes=(6, 4), **attributes):
    found = nn.Linear(*sizes)
    found.weight = quantized(found.weight, package, kind)
    for name, value in attributes.items():
        setattr(found.weight, name, value)
    return found


@pytest.mark.parametrize("package", ["torchao", "optimum"])
def test_integers_and_scales_are_the_packages_own_tensors(package):
    layer = linear(package)
    integers, scales = integers_of(layer)
    assert integers is layer.weight.qdata
    assert scales is layer.weight.scale
    assert integers_of(linear(package, scale=torch.rand(4, 2), _scale=torch.rand(4, 2))) is None  # of three integers
    assert integers_of(linear(package, qdata=torch.rand(4, 6), _data=torch.rand(4, 6))) is None  # 8 bits, floating
    meta = torch.empty(4, 6, dtype=torch.int8, device="meta")
    assert integers_of(linear(package, qdata=meta, _data=meta)) is None
    assert integers_of(nn.Linear(6, 4)) is None
    assert integers_of(linear("elsewhere")) is None


def test_groups_and_zero_points_are_found_where_the_kernel_can_read_them():
    sizes = 32, 64
    assert len(integers_of(linear(kind="groups", sizes=sizes))) == 2
    assert len(integers_of(linear(kind="zeros", sizes=sizes))) == 3
    assert len(integers_of(linear(kind="zeros", sizes=sizes, zero_point=torch.zeros(64, 2)))) == 2
    assert integers_of(linear(kind="zeros", sizes=sizes, zero_point=torch.ones(64, 1))) is None
    assert integers_of(linear(kind="groups", sizes=sizes, scale=torch.rand(64, 4))) is None  # of eight integers
    assert integers_of(linear(zero_point=torch.ones(4, 1))) is None  # of six integers
    layer = linear(kind="int4", sizes=sizes)
    assert integers_of(layer) == (layer.weight.qdata, layer.weight.scale_and_zero)
    assert integers_of(linear(kind="int4", sizes=(32, 48))) is None
    assert integers_of(linear(kind="int4", sizes=sizes, act_mapping_type="asymmetric")) is None


def test_layers_that_quantise_their_input_are_left_alone():
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


def read_by_layers(monkeypatch):
    """The dtypes of the integers that whole layers read, from now on."""
    seen, run = set(), FusedLayer.run

    def counted(self, *args):
        seen.update(weight.dtype for weight in self._after[3])
        return run(self, *args)

    monkeypatch.setattr(FusedLayer, "run", counted)
    monkeypatch.setattr(Probe, "most_tokens", lambda _: 1)  # passes over more take single products
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_tokens_are_the_quantised_models(tiny_llama, products, engine, kind, monkeypatch):
    model = quantize(tiny_llama(num_hidden_layers=LAYERS, **SIZES), kind)
    seen = read_by_layers(monkeypatch)
    expected = model.generate(**prompts(), **OPTIONS)
    attach(model, engine)
    use_drafter(model, "right", new_tokens(expected), width=4)
    assert len(integer_gates(model)) == 7 * LAYERS
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert products
    assert seen == {torch.uint8 if kind == "int4" else torch.int8}
    TIDEModelForCausalLM.detach(model)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)


def test_a_layer_of_which_some_weights_are_quantised_reads_both(tiny_llama, monkeypatch):
    model = tiny_llama(num_hidden_layers=LAYERS, **SIZES)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = quantized(layer.mlp.down_proj.weight, kind="int4")
    expected = model.generate(**prompts(), **OPTIONS)
    seen = read_by_layers(monkeypatch)
    attach(model)
    use_drafter(model, "random", new_tokens(expected), width=0)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert seen == {torch.float32, torch.uint8}


def test_a_long_prompt_takes_the_kernel_with_int4_weights_alone(tiny_llama, products):
    model = quantize(tiny_llama(num_hidden_layers=LAYERS, **SIZES), "int4")
    batch = prompts(length=MAX_FLOAT_ROWS + 1)
    expected = model.generate(**batch, **OPTIONS)
    attach(model)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert max(products) > MAX_FLOAT_ROWS


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


@pytest.mark.parametrize("kind", ["rows", "zeros"])
@pytest.mark.parametrize("change", ["scales", "integers", "other scales", "other integers", "zero points", "weight"])
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_changed_weights_are_followed(tiny_llama, products, engine, change, kind):
    model = quantize(tiny_llama(num_hidden_layers=LAYERS), kind)
    attach(model, engine)
    before = model.generate(**prompts(), **OPTIONS)
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        if change == "weight":
            layer.self_attn.v_proj.weight = quantized(-3.0 * weight.dequantize(), kind=kind)
        elif change == "zero points":  # integers by row have none
            weight.zero_point = torch.full_like(weight.scale, 90, dtype=torch.int8)
        elif change == "other scales":
            weight.scale = -weight.scale
        elif change == "other integers":
            weight.qdata = -weight.qdata
        else:
            (weight.scale if change == "scales" else weight.qdata).mul_(-1)
    after = model.generate(**prompts(), **OPTIONS)
    assert not torch.equal(after, before)
    assert products
    assert torch.equal(after, TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS))
