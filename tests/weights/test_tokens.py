"""Models whose weights need fewer bits, or are quantised: their tokens stay, and changed weights are followed."""

import pytest
import torch
from drafters import use_drafter
from on_steps import LAYERS, OPTIONS, as_traced, new_tokens, prompts, use_steps
from packed_weights import converted, narrow, set_fastest_layouts
from quantized_weights import KINDS, quantize, quantized

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.steps.step_store import CompiledSteps
from tide_hf.kernels.cpu.cpp_kernels import build_kernels
from tide_hf.weights import fused_layers
from tide_hf.weights.fused_layers import FusedStack, Probe
from tide_hf.weights.integers import MAX_FLOAT_ROWS, MAX_ROWS, IntegerWeight
from tide_hf.weights.layouts import PlainWeight, StoredWeight
from tide_hf.weights.linear_gate import IntegerGate
from tide_hf.weights.lossless import HalfWeight, RequantizedWeight

SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
LOSSLESS = {"bfloat16": HalfWeight, "float16": HalfWeight, "integers": RequantizedWeight}
STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int4": torch.uint8}  # else int8

pytestmark = pytest.mark.usefixtures("_stored_weights_are_fastest")
on_both_engines = pytest.mark.parametrize("engine", ["eager", "compiled"])


@pytest.fixture
def _stored_weights_are_fastest(monkeypatch):
    build_kernels(torch.float32)
    set_fastest_layouts(monkeypatch, order=(RequantizedWeight, HalfWeight, PlainWeight, None))


@pytest.fixture
def products(monkeypatch):
    """The numbers of rows of products with stored weights, outside compiled graphs."""
    seen, apply = [], StoredWeight.apply

    def counted(self, input, bias):
        seen.append(input.numel() // input.shape[-1])
        return apply(self, input, bias)

    monkeypatch.setattr(StoredWeight, "apply", counted)
    return seen


@pytest.fixture
def read_by_layers(monkeypatch):
    """The dtypes of the weights that whole layers read."""
    seen = set()

    def counted(self, *args, run=FusedStack.__call__, **options):
        seen.update(weight.dtype for layer in self.layers for weight in layer.weights)
        return run(self, *args, **options)

    monkeypatch.setattr(FusedStack, "__call__", counted)
    return seen


def attach(model, engine="eager", **settings):
    TIDEModelForCausalLM.attach(model, engine=engine, remembered_tokens=0, **settings)
    model._tide.weights.copies_at_once = True
    use_steps(model, CompiledSteps(as_traced))
    return model


@pytest.mark.parametrize("kind", [*LOSSLESS, *KINDS])
@on_both_engines
@pytest.mark.parametrize("most_tokens", [16, 1], ids=["layers as kernels", "single products but of one token"])
def test_tokens_are_the_models_own(tiny_llama, engine, kind, most_tokens, products, read_by_layers, monkeypatch):
    model = (narrow if kind in LOSSLESS else quantize)(tiny_llama(**SIZES), kind)
    monkeypatch.setattr(Probe, "most_tokens", lambda _: most_tokens)
    expected = model.generate(**prompts(), **OPTIONS)
    attach(model, engine)
    use_drafter(model, "wrong at the last position", new_tokens(expected), width=4)
    products.clear()
    read_by_layers.clear()  # probes have read plain weights
    for _ in range(2):
        assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert LOSSLESS.get(kind, IntegerWeight) in converted(model)
    gates = [gate for gate in model._tide.weights.gates() if isinstance(gate, IntegerGate)]
    assert len(gates) == (0 if kind in LOSSLESS else 7 * LAYERS)
    assert products or most_tokens > 1
    assert read_by_layers == {STORED.get(kind, torch.int8)}
    TIDEModelForCausalLM.detach(model)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)


@on_both_engines
def test_a_layer_of_several_kinds_of_weights_reads_each_in_its_bits(tiny_llama, engine, read_by_layers, monkeypatch):
    monkeypatch.setattr(Probe, "most_tokens", lambda _: 16)
    model = tiny_llama(**SIZES)
    for layer in model.model.layers:
        narrow(layer.self_attn.q_proj, "bfloat16")
        narrow(layer.self_attn.k_proj, "integers")
        narrow(layer.mlp, "float16")
        layer.mlp.down_proj.weight = quantized(layer.mlp.down_proj.weight, kind="int4")
    expected = model.generate(**prompts(), **OPTIONS)
    attach(model, engine)
    read_by_layers.clear()
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert {HalfWeight, RequantizedWeight, PlainWeight, IntegerWeight} <= converted(model)
    assert read_by_layers == {torch.bfloat16, torch.int8, torch.float16, torch.uint8, torch.float32}


@pytest.mark.usefixtures("no_fused_layers")
@pytest.mark.parametrize("kind", ["rows", "int4"])
def test_a_long_prompt_takes_the_kernel_with_int4_weights_alone(tiny_llama, products, kind):
    model, batch = quantize(tiny_llama(**SIZES), kind), prompts(length=MAX_FLOAT_ROWS + 1)
    expected = model.generate(**batch, **OPTIONS)
    attach(model)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert max(products) > MAX_FLOAT_ROWS if kind == "int4" else max(products) <= MAX_ROWS  # of verify passes
    products.clear()
    TIDEModelForCausalLM.detach(model)
    attach(model, use_kernels=False)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert products == []


@pytest.mark.parametrize("kind", LOSSLESS)
@on_both_engines
@pytest.mark.parametrize("is_still_narrow", [True, False])
def test_changed_weights_are_followed(tiny_llama, engine, kind, is_still_narrow):
    model = attach(narrow(tiny_llama(**SIZES), kind), engine)
    before = model.generate(**prompts(), **OPTIONS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(-2.0 if is_still_narrow else -1.7)
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * (4.0 if is_still_narrow else 3.3)
    after = model.generate(**prompts(), **OPTIONS)
    assert not torch.equal(after, before)
    kinds = [set(layer.mlp.up_proj.forward.converted) for layer in model.model.layers]
    assert all((LOSSLESS[kind] in found) == is_still_narrow for found in kinds)
    assert torch.equal(after, TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS))


@pytest.mark.parametrize("kind", ["rows", "zeros"])
@pytest.mark.parametrize("change", ["scales", "integers", "other scales", "other integers", "zero points", "weight"])
@on_both_engines
def test_changed_integers_are_followed(tiny_llama, products, engine, change, kind):
    model = attach(quantize(tiny_llama(num_hidden_layers=LAYERS), kind), engine)
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


def test_measuring_a_layer_forgets_no_weight_that_a_step_reads(tiny_llama, monkeypatch):
    model = narrow(tiny_llama(**SIZES), "bfloat16")
    expected = model.generate(**prompts(), **OPTIONS)

    def measured(_name, number, measure):
        measure()
        return [1.0, 0.0] * (number // 2)  # the kernels are faster

    monkeypatch.setattr(fused_layers, "measured", measured)
    attach(model, "compiled")
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    linears = [part for part in model.model.layers.modules() if type(part) is torch.nn.Linear]
    assert all(HalfWeight in linear.forward.converted for linear in linears)
    with torch.no_grad():
        for linear in linears:
            linear.weight.mul_(-2.0)
    changed = model.generate(**prompts(), **OPTIONS)
    assert torch.equal(changed, TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS))


@pytest.mark.parametrize("kind", ["bfloat16", "integers"])
def test_no_answer_waits_for_the_conversion_after_a_warm_up(tiny_llama, monkeypatch, kind):
    model = TIDEModelForCausalLM.attach(narrow(tiny_llama(**SIZES), kind))
    assert model.tide_warm_up() > 0.0
    assert LOSSLESS[kind] in converted(model)
    assert model.tide_warm_up() == 0.0
    monkeypatch.setattr(LOSSLESS[kind], "_convert", lambda *_: pytest.fail("converted later"))
    model.generate(**prompts(), do_sample=False, max_new_tokens=2)
