"""Float32 weights read in fewer bits: found from the values, exact, and given up where a value would change."""

import pytest
import torch
from drafters import use_drafter
from on_steps import LAYERS, OPTIONS, as_traced, new_tokens, prompts, use_steps
from packed_weights import narrow, set_fastest_layouts

from tide_hf import TIDEModelForCausalLM
from tide_hf.depth import fused_layers
from tide_hf.depth.fused_layers import FusedLayer, Probe
from tide_hf.engines.steps.step_store import CompiledSteps
from tide_hf.kernels.cpu.cpp_kernels import build_kernels
from tide_hf.kernels.cpu.lossless_weights import MAX_ROWS, HalfWeight, InexactWeightError, RequantizedWeight
from tide_hf.kernels.cpu.weight_layouts import PlainWeight

ORDER = (RequantizedWeight, HalfWeight, PlainWeight, None)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}  # whole groups
LAYOUTS = {"bfloat16": HalfWeight, "float16": HalfWeight, "integers": RequantizedWeight}


def scales_like(groups, bits=10):
    """Positive scales (groups, 1) with `bits` bits after the first."""
    return (torch.randint(1 << bits, 2 << bits, (len(groups), 1)) * 2.0 ** -(bits + 9)).float()


def of_gguf(sizes, kind, group=32):
    """Weights as transformers dequantises the types of GGUF."""
    groups = torch.empty(sizes).view(-1, group)
    scales = scales_like(groups)
    if kind in ("Q4_1", "Q5_1"):
        top = 15 if kind == "Q4_1" else 31
        integers = torch.randint(0, top + 1, groups.shape).float()
        integers[:, 0], integers[:, 1] = 0, top  # as the quantiser spreads them
        groups = scales * integers - 8 * scales_like(groups)
    elif kind == "Q4_K":  # some groups do not use all steps
        scales, integers = scales * scales_like(groups, 5), torch.randint(0, 12, groups.shape).float()
        integers[:, 0], integers[:, 1], integers[:, 2] = 0, 11, 5
        groups = scales * integers - 8 * scales_like(groups) * scales_like(groups, 5)
    elif kind == "Q8_0":
        integers = torch.randint(-127, 128, groups.shape).float()
        integers[:, 0] = 127
        groups = scales * integers
    elif kind == "Q6_K":  # products that float32 rounds
        integers = torch.randint(-32, 32, groups.shape).float()
        integers[:, 0], integers[:, 1], integers[:, 2] = -32, 31, 30
        groups = scales * torch.randint(64, 128, (len(groups), 1)) * integers
    elif kind == "Q4_K of two values":  # near 0 and minus the zero
        zeros = scales * scales_like(groups, 5)
        steps = ((zeros / 11).view(torch.int32) & -128).view(torch.float32)  # of 17 bits
        groups = torch.where(torch.rand(groups.shape) < 0.5, steps * 11 - zeros, -zeros)
    else:
        groups = (scales * scales_like(groups, 5)).expand_as(groups)
    return groups.reshape(sizes).contiguous()


KINDS = ("Q4_1", "Q5_1", "Q4_K", "Q8_0", "Q6_K", "Q4_K of two values", "one value")


def check_products(layout, weight):
    plain = PlainWeight(weight)
    for rows in (*range(1, 10), MAX_ROWS):
        state, bias = torch.randn(rows, weight.shape[1]), torch.randn(len(weight))
        found = layout.apply(state, bias)
        torch.testing.assert_close(found, plain.apply(state, bias), atol=1e-5, rtol=1e-5)
        assert torch.equal(found, torch.cat([layout.apply(row, bias) for row in state.split(1)]))


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", [torch.float32])
def test_products_are_the_plain_weights_and_round_alike_for_any_number_of_rows(dtype):
    torch.manual_seed(0)
    for size, size_out in ((576, 192), (4864, 33), (40, 7), (3, 2)):
        for stored in (torch.bfloat16, torch.float16):
            weight = torch.randn(size_out, size).to(stored).to(dtype)
            layout = HalfWeight(weight)
            assert layout.values.dtype is stored
            check_products(layout, weight)
            state = torch.randn(3, size)
            assert torch.equal(layout.apply(state, None), PlainWeight(weight).apply(state, None))  # bit for bit
    for kind in KINDS:
        weight = of_gguf((24, 576), kind)
        check_products(RequantizedWeight(weight), weight)


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_integers_of_gguf_are_found_again(kind, group):
    torch.manual_seed(0)
    weight = of_gguf((48, 480), kind, group)
    layout = RequantizedWeight(weight)
    integers, (scales, zeros) = layout.values.view(48, layout.scales.shape[1], -1), layout.scales.unbind(-1)
    wide = integers.double() * scales[..., None].double() + zeros[..., None].double()
    assert torch.equal(wide.float().view_as(weight), weight)  # rounded once, as a fused multiply-add does
    assert torch.equal((integers * scales[..., None] + zeros[..., None]).view_as(weight), weight)
    assert layout.values.dtype is torch.int8
    assert layout.scales.shape[1] >= 480 // 32


def with_value(weight, value):
    weight = weight.clone()
    weight[-1, -1] = value
    return weight


@pytest.mark.parametrize("value", [0.1, 1e-9, 1e9, torch.nan])
def test_one_value_that_needs_more_bits_is_seen(value):
    torch.manual_seed(0)
    half = torch.randn(64, 96).half().float()
    for weight in (half, half.bfloat16().float()):
        with pytest.raises(InexactWeightError):
            HalfWeight(with_value(weight, 0.1 if value is torch.nan else value))
    grid = of_gguf((4096, 96), "Q4_1")
    for weight in (with_value(grid, value), grid + torch.randn(grid.shape) * 1e-6, torch.randn(64, 96)):
        with pytest.raises(InexactWeightError):
            RequantizedWeight(weight)
    for weight in (half, half.bfloat16().float(), torch.randn(4, 40), torch.randn(0, 32)):  # which halves suit better
        with pytest.raises(InexactWeightError):
            RequantizedWeight(weight)


def test_more_steps_than_int8_has_are_refused():
    torch.manual_seed(0)
    integers = torch.randint(0, 256, (512, 32)).float()
    integers[:, 0], integers[:, 1], integers[:, 2] = 0, 255, 254
    with pytest.raises(InexactWeightError):
        RequantizedWeight(scales_like(integers) * integers - 300 * scales_like(integers))


def test_weights_of_any_strides_are_read():
    torch.manual_seed(0)
    weight = torch.randn(96, 64).bfloat16().float().T
    check_products(HalfWeight(weight), weight)
    weight = of_gguf((96, 128), "Q8_0")[:, :64]
    check_products(RequantizedWeight(weight), weight)


@pytest.fixture
def attach(monkeypatch):
    build_kernels(torch.float32)
    set_fastest_layouts(monkeypatch, order=ORDER)

    def run(model, engine="eager"):
        TIDEModelForCausalLM.attach(model, engine=engine, remembered_tokens=0, pack_weights=True)
        use_steps(model, CompiledSteps(as_traced))
        return model

    return run


def converted(model):
    return {layout for gate in model._tide.gates() for layout in gate.converted}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("as_kernels", [True, False], ids=["layers as kernels", "single products"])
def test_tokens_are_the_models_own(tiny_llama, attach, engine, kind, as_kernels, monkeypatch):
    model = narrow(tiny_llama(num_hidden_layers=LAYERS, **SIZES), kind)
    seen = set()

    def counted(run, self, *args):
        seen.update(weight.dtype for weight in (*self._before[2], *self._after[3]))
        return run(self, *args)

    for name in ("run", "on_static_cache"):
        run = getattr(FusedLayer, name)
        monkeypatch.setattr(FusedLayer, name, lambda self, *args, run=run: counted(run, self, *args))
    monkeypatch.setattr(Probe, "most_tokens", lambda _: 16 if as_kernels else 0)
    expected = model.generate(**prompts(), **OPTIONS)
    attach(model, engine)
    use_drafter(model, "wrong at the last position", new_tokens(expected), width=4)
    seen.clear()  # probes have read plain weights
    for _ in range(2):
        assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert LAYOUTS[kind] in converted(model)
    assert seen == ({torch.int8 if kind == "integers" else getattr(torch, kind)} if as_kernels else set())
    TIDEModelForCausalLM.detach(model)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_layer_of_several_kinds_of_weights_reads_each_in_its_bits(tiny_llama, attach, engine):
    model = tiny_llama(num_hidden_layers=LAYERS, **SIZES)
    for layer in model.model.layers:
        narrow(layer.self_attn.q_proj, "bfloat16")
        narrow(layer.self_attn.k_proj, "integers")
        narrow(layer.mlp, "float16")
    expected = model.generate(**prompts(), **OPTIONS)
    attach(model, engine)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert {HalfWeight, RequantizedWeight, PlainWeight} <= converted(model)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("is_still_narrow", [True, False])
def test_changed_weights_are_followed(tiny_llama, attach, engine, kind, is_still_narrow):
    model = attach(narrow(tiny_llama(num_hidden_layers=LAYERS, **SIZES), kind), engine)
    before = model.generate(**prompts(), **OPTIONS)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(-2.0 if is_still_narrow else -1.7)
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * (4.0 if is_still_narrow else 3.3)
    after = model.generate(**prompts(), **OPTIONS)
    assert not torch.equal(after, before)
    kinds = [set(layer.mlp.up_proj.forward.converted) for layer in model.model.layers]
    assert all((LAYOUTS[kind] in found) == is_still_narrow for found in kinds)
    assert torch.equal(after, TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS))


def test_measuring_a_layer_forgets_no_weight_that_a_step_reads(tiny_llama, attach, monkeypatch):
    model = narrow(tiny_llama(num_hidden_layers=LAYERS, **SIZES), "bfloat16")
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


@pytest.mark.parametrize(
    ("kind", "lengths", "found"),
    [
        ("bfloat16", (16, 24), (set(), {HalfWeight})),
        ("integers", (96, 64), (set(), {RequantizedWeight})),
        ("integers", (128,), ({RequantizedWeight},)),
    ],
)
def test_short_first_answers_do_not_wait_for_the_conversion(tiny_llama, attach, kind, lengths, found):
    model = attach(narrow(tiny_llama(num_hidden_layers=LAYERS, **SIZES), kind))
    model._tide.copies_at_once = False
    for length, expected in zip(lengths, found, strict=True):
        model.generate(**prompts(), do_sample=False, min_new_tokens=length, max_new_tokens=length)
        assert converted(model) & {HalfWeight, RequantizedWeight} == expected


@pytest.mark.parametrize(("kind", "layout"), [("bfloat16", HalfWeight), ("integers", RequantizedWeight)])
def test_no_answer_waits_for_the_conversion_after_a_warm_up(tiny_llama, attach, monkeypatch, kind, layout):
    model = attach(narrow(tiny_llama(num_hidden_layers=LAYERS, **SIZES), kind))
    model._tide.copies_at_once = False
    assert model.tide_warm_up() > 0.0
    assert layout in converted(model)
    assert model.tide_warm_up() == 0.0
    monkeypatch.setattr(layout, "_convert", lambda *_: pytest.fail("converted later"))
    model.generate(**prompts(), do_sample=False, max_new_tokens=2)


def test_no_copy_is_made_where_memory_is_short(tiny_llama, attach):
    model = attach(narrow(tiny_llama(num_hidden_layers=LAYERS, **SIZES), "bfloat16"))
    for gate in model._tide.gates():
        gate.may_copy = False
    model.generate(**prompts(), **OPTIONS)
    assert converted(model) == {PlainWeight}


def test_a_weight_that_needs_all_bits_is_tried_once(tiny_llama, attach, monkeypatch):
    model = attach(tiny_llama(num_hidden_layers=LAYERS, **SIZES))
    model.generate(**prompts(), **OPTIONS)
    assert converted(model) == {PlainWeight}
    for layout in (HalfWeight, RequantizedWeight):
        monkeypatch.setattr(layout, "_convert", lambda *_: pytest.fail("tried again"))
    model.generate(**prompts(), **OPTIONS)
