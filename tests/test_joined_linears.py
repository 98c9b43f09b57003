"""Linear layers that read the same states as one product: the same numbers, from weights that are still the model's."""

import pytest
import torch
from drafters import use_drafter
from families import ATTENTION, slow_but, tiny_model
from on_steps import FEW, LAYERS, NEW, OPTIONS, UNTRACED, as_traced, check_drafts, draft_with_heads, prompts
from on_steps import attach_compiled as attach
from test_linear_gate import let_pay
from torch.fx.experimental.proxy_tensor import make_fx

from tide_hf import TIDEModelForCausalLM
from tide_hf.depth import linear_gate
from tide_hf.engines.steps.joined_linears import JOINED, ONE, call_kernels, join_linears
from tide_hf.kernels.cpu import weight_forms
from tide_hf.kernels.cpu.products import MOST_ROUNDED_ROWS, rounded_product_of, stored_product_of
from tide_hf.kernels.cpu.weight_forms import FORMS, PackedWeight, RoundedWeight, StoredWeight, in_form

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
ALONE = ("gpt2", "gpt_neox", "bloom", "falcon", "phi3")  # families with one product before attention and in the MLP


@pytest.fixture(autouse=True)
def _it_pays(monkeypatch):
    """Whatever this machine is, packed weights are the faster ones."""
    let_pay(monkeypatch)


class Graphs:
    """Stands in for Inductor; notes how many layers each product is of, and which ops there are."""

    def __init__(self):
        self.products, self.ops = [], set()

    def __call__(self, graph, _inputs):
        ops = [node for node in graph.graph.nodes if getattr(node.target, "namespace", None) == "tide_hf"]
        self.ops |= {node.target for node in ops}
        joined = [len(node.args[1]) for node in ops if node.target is JOINED or "stored_rows" in node.target.name()]
        self.products += [count for count in joined if count > 1]
        return as_traced(graph, _inputs)


def attach_packed(model, routers=None, compile_graph=as_traced):
    return attach(model, routers, compile_graph, pack_weights=True)


@pytest.mark.parametrize(
    "family", slow_but((*FEW, "phi3", "gpt_neox"), [family for family in ATTENTION if family not in UNTRACED])
)
def test_every_familys_tokens_are_the_base_models(family):
    graphs = Graphs()
    steps = check_drafts(
        tiny_model(family),
        prompts(pads=2),
        lambda model, routers: attach_packed(model, routers, graphs),
        draft_with_heads,
        ("right", "wrong at the last position"),
        width=4,
    )
    assert steps.refused is None
    assert bool(graphs.products) == (family not in ALONE)


def test_what_is_before_attention_and_what_is_in_the_mlp(tiny_llama):
    model, graphs = tiny_llama(num_hidden_layers=LAYERS), Graphs()
    attach_packed(model, compile_graph=graphs)
    model.generate(**prompts(), **OPTIONS)
    assert set(graphs.products) == {3, 2}


def test_there_has_to_be_memory_for_one_more_copy(tiny_llama, monkeypatch):
    model, graphs = tiny_llama(num_hidden_layers=LAYERS), Graphs()
    expected = model.generate(**prompts(), **OPTIONS)
    monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)
    steps = attach_packed(model, compile_graph=graphs)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.replays > 0
    assert not graphs.products


@pytest.mark.parametrize("change", ["in place", "data"])
def test_weights_that_change_are_joined_anew(tiny_llama, change):
    model = tiny_llama(num_hidden_layers=LAYERS)
    steps = attach_packed(model)
    use_drafter(model, "random", [[5] * NEW], width=4)
    before = model.generate(**prompts(), **OPTIONS)
    assert steps.replays > 0
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.k_proj.weight
            (weight if change == "in place" else weight.data).mul_(-1.0)
    after = model.generate(**prompts(), **OPTIONS)
    assert not torch.equal(after, before)
    assert torch.equal(after, TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS))


def test_their_memory_is_given_back(tiny_llama):
    model = tiny_llama(num_hidden_layers=LAYERS)
    attach_packed(model)
    model.generate(**prompts(), **OPTIONS)
    weights = [getattr(model.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"]
    key = weight_forms._key_of(weights, PackedWeight)
    assert weight_forms._known[key].is_of(*weights)
    model.tide_release()
    assert key not in weight_forms._known


@pytest.mark.parametrize("may_copy", [True, False])
@pytest.mark.parametrize("form", [PackedWeight, StoredWeight])
@pytest.mark.parametrize("case", ["alike", "with biases", "one bias", "two inputs", "one rounded"])
def test_layers_of_one_input_become_one_product(case, form, may_copy):
    weights, biases = [torch.randn(size, 6) for size in (4, 3)], [None, None]
    if case in ("with biases", "one bias"):
        biases = [torch.randn(4), torch.randn(3) if case == "with biases" else None]

    def layers(state, *constants):
        inputs = [state, state + 1 if case == "two inputs" else state]
        forms = [FORMS.index(form), FORMS.index(RoundedWeight if case == "one rounded" else form)]
        found = [ONE(*call) for call in zip(inputs, constants[:2], constants[2:], forms, strict=True)]
        return torch.cat(found, dim=-1)

    state, constants = torch.randn(1, 2, 6), [*weights, *(bias for bias in biases if bias is not None)]

    def function(state, *given):
        rest = iter(given[2:])
        return layers(state, *given[:2], *(bias if bias is None else next(rest) for bias in biases))

    graph = make_fx(function, tracing_mode="fake")(state, *constants)
    joined = join_linears(graph, constants, may_copy)
    is_joined = case in ("alike", "with biases") and (may_copy or form is StoredWeight)
    assert joined == ([([0, 1], FORMS.index(form))] if is_joined else [])
    assert sum(node.target is ONE for node in graph.graph.nodes) == (0 if joined else 2)
    kept = in_form(form, *weights)
    torch.testing.assert_close(graph(state, *constants), layers(state, *weights, *biases))
    assert isinstance(kept, form)
    del kept
    torch.testing.assert_close(graph(state, *constants), layers(state, *weights, *biases))  # as plain products


@pytest.mark.parametrize("case", ["stored", "joined", "packed", "turned", "made here", "rounded, many", "no kernel"])
def test_the_kernel_is_called_where_weights_are_read_as_they_are_stored(case):
    form = FORMS.index({"packed": PackedWeight, "rounded, many": RoundedWeight}.get(case, StoredWeight))
    dtype = torch.float64 if case == "no kernel" else torch.float32
    weights = [torch.randn(6, size).t() if case == "turned" else torch.randn(size, 6) for size in (4, 3)]
    inputs = [torch.randn(1, MOST_ROUNDED_ROWS + 1, 6), torch.randn(7), *weights]
    inputs = [tensor.to(dtype) for tensor in inputs]

    def function(state, bias, *weights):
        used = [weight * 2.0 for weight in weights] if case == "made here" else list(weights)
        if case == "joined":
            return JOINED(state, used, bias, form)
        return ONE(state, used[0], bias[:4], form) + ONE(state, used[0], None, form)

    graph = make_fx(function, tracing_mode="fake")(*inputs)
    call_kernels(graph, inputs)
    targets = {node.target for node in graph.graph.nodes}
    is_called = case in ("stored", "joined")
    assert (stored_product_of(torch.float32) in targets) == is_called
    assert rounded_product_of(torch.float32) not in targets
    assert bool({ONE, JOINED} & targets) != is_called
    torch.testing.assert_close(graph(*inputs), function(*inputs))
