"""Fused linear layers: the same numbers as single ones, from weights that are still the model's."""

import pytest
import torch
from drafters import use_drafter
from families import ATTENTION, slow_but, tiny_model
from on_steps import LAYERS, NEW, OPTIONS, check_drafts, prompts
from packed_weights import Graphs, attach_packed, converted, set_fastest_layouts
from torch.fx.experimental.proxy_tensor import make_fx

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.steps.fused_linears import LINEAR, call_kernels, fuse_linears
from tide_hf.kernels.cpu.cpp_kernels import load_op
from tide_hf.weights import linear_gate
from tide_hf.weights.layouts import WEIGHT_LAYOUTS, PlainWeight, PrepackedWeight, UpcastWeight, in_layout

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
ALONE = ("gpt2", "gpt_neox", "bloom", "falcon", "phi3")  # families with one product before attention and in the MLP


@pytest.fixture(autouse=True)
def _prepacked_weights_are_fastest(monkeypatch, no_fused_layers):
    """On any machine."""
    set_fastest_layouts(monkeypatch)


@pytest.mark.parametrize("family", slow_but(("gpt2", "opt", "gemma2"), ATTENTION))
def test_every_family_generates_the_base_models_tokens(family):
    graphs = Graphs()
    steps = check_drafts(
        tiny_model(family),
        prompts(pads=2),
        lambda model, routers: attach_packed(model, routers, graphs),
        ("right", "wrong at the last position"),
        width=4,
    )
    assert steps.refused is None
    assert bool(graphs.products) == (family not in ALONE)


@pytest.mark.parametrize("has_memory", [True, False])
def test_qkv_and_gate_and_up_are_fused_without_a_copy_where_memory_is_short(tiny_llama, monkeypatch, has_memory):
    model, graphs = tiny_llama(num_hidden_layers=LAYERS), Graphs()
    expected = model.generate(**prompts(), **OPTIONS)
    if not has_memory:
        monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)
    steps = attach_packed(model, compile_graph=graphs)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.replays > 0
    assert set(graphs.products) == {3, 2}
    assert PlainWeight in converted(model)


@pytest.mark.parametrize("change", ["in place", "data"])
def test_changed_weights_are_fused_again(tiny_llama, change):
    model = tiny_llama(num_hidden_layers=LAYERS)
    steps = attach_packed(model)
    use_drafter(model, "random", [[5] * NEW], width=0)
    before = model.generate(**prompts(), **OPTIONS)
    assert steps.replays > 0
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.k_proj.weight
            (weight if change == "in place" else weight.data).mul_(-1.0)
    after = model.generate(**prompts(), **OPTIONS)
    assert not torch.equal(after, before)
    assert torch.equal(after, TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS))


@pytest.mark.parametrize("may_copy", [True, False])
@pytest.mark.parametrize("layout", [PrepackedWeight, PlainWeight])
@pytest.mark.parametrize("case", ["alike", "with biases", "one bias", "two inputs", "two layouts"])
def test_linears_that_read_one_input_are_fused(case, layout, may_copy):
    weights, biases = [torch.randn(size, 6) for size in (4, 3)], [None, None]
    if case in ("with biases", "one bias"):
        biases = [torch.randn(4), torch.randn(3) if case == "with biases" else None]

    def layers(state, *constants):
        inputs = [state, state + 1 if case == "two inputs" else state]
        other = UpcastWeight if case == "two layouts" else layout
        layouts = [WEIGHT_LAYOUTS.index(layout), WEIGHT_LAYOUTS.index(other)]
        calls = zip(inputs, constants[:2], constants[2:], layouts, strict=True)
        found = [LINEAR(state, [weight], bias, number) for state, weight, bias, number in calls]
        return torch.cat(found, dim=-1)

    state, constants = torch.randn(1, 2, 6), [*weights, *(bias for bias in biases if bias is not None)]

    def function(state, *given):
        rest = iter(given[2:])
        return layers(state, *given[:2], *(bias if bias is None else next(rest) for bias in biases))

    graph = make_fx(function, tracing_mode="fake")(state, *constants)
    fused = fuse_linears(graph, constants, may_copy)
    is_fused = case in ("alike", "with biases") and (may_copy or layout is PlainWeight)
    assert fused == ([([0, 1], WEIGHT_LAYOUTS.index(layout))] if is_fused else [])
    assert sum(node.target is LINEAR for node in graph.graph.nodes) == (1 if fused else 2)
    kept = in_layout(layout, *weights)
    torch.testing.assert_close(graph(state, *constants), layers(state, *weights, *biases))
    assert isinstance(kept, layout)
    del kept
    torch.testing.assert_close(graph(state, *constants), layers(state, *weights, *biases))  # as plain products


@pytest.mark.parametrize("has_biases", [False, True])
def test_products_with_integers_are_fused(has_biases):
    gemm, sizes = load_op("skinny_gemm", torch.float32), (4, 3)
    integers = [torch.randint(-127, 128, (size, 6), dtype=torch.int8) for size in sizes]
    scales, biases = ([torch.rand(size) for size in sizes] for _ in range(2))

    def function(state, *constants):
        calls = zip(constants[:2], constants[2:4], constants[4:] if has_biases else (None, None), strict=True)
        return torch.cat([gemm(state, [weight], bias, [scale]) for weight, scale, bias in calls], dim=-1)

    inputs = [torch.randn(1, 2, 6), *integers, *scales, *(biases if has_biases else [])]
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    assert fuse_linears(graph, inputs[1:], may_copy=False) == []  # no layout has to be kept alive
    assert sum(node.target is gemm for node in graph.graph.nodes) == 1
    torch.testing.assert_close(graph(*inputs), function(*inputs))


@pytest.mark.parametrize("case", ["plain", "fused", "packed", "turned", "made here", "no kernel"])
def test_kernels_are_called_for_plain_weights(case):
    layout = WEIGHT_LAYOUTS.index(PrepackedWeight if case == "packed" else PlainWeight)
    dtype = torch.float64 if case == "no kernel" else torch.float32
    weights = [torch.randn(6, size).t() if case == "turned" else torch.randn(size, 6) for size in (4, 3)]
    inputs = [torch.randn(1, 2, 6), torch.randn(7), *weights]
    inputs = [tensor.to(dtype) for tensor in inputs]

    def function(state, bias, *weights):
        used = [weight * 2.0 for weight in weights] if case == "made here" else list(weights)
        if case == "fused":
            return LINEAR(state, used, bias, layout)
        return LINEAR(state, used[:1], bias[:4], layout) + LINEAR(state, used[:1], None, layout)

    graph = make_fx(function, tracing_mode="fake")(*inputs)
    call_kernels(graph, inputs)
    targets = {node.target for node in graph.graph.nodes}
    is_called = case in ("plain", "fused")
    assert (load_op("skinny_gemm", torch.float32) in targets) == is_called
    assert (LINEAR in targets) != is_called
    torch.testing.assert_close(graph(*inputs), function(*inputs))
