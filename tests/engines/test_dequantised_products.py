"""Products with weights that a graph dequantises, as reductions: the same numbers, and only where they are meant."""

import pytest
import torch
from quantized_weights import KINDS, quantized
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from tide_hf.engines.steps.dequantised_products import MAX_ROWS, PRODUCTS, reduce_products
from tide_hf.engines.steps.graphs import lift_constants, traced

SIZE, OUT = 64, 128
aten = torch.ops.aten


def products_in(graph):
    return [node.target for node in graph.graph.nodes if node.target in PRODUCTS]


def reduced(function, *inputs):
    """A traced graph and its constants, before and after the pass, and how many products it replaced."""
    graph, constants = lift_constants(traced(function, *inputs))
    expected = graph(*inputs, *constants)
    found = reduce_products(graph, constants)
    return graph, constants, expected, found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int4"])
@pytest.mark.parametrize("rows", [1, 5, MAX_ROWS])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_quantised_weights_become_reductions_over_their_integers(kind, rows, has_bias, dtype):
    torch.manual_seed(0)
    weight, bias = quantized(torch.randn(OUT, SIZE, dtype=dtype), kind=kind), torch.randn(OUT, dtype=dtype)
    state = torch.randn(1, rows, SIZE, dtype=dtype)
    graph, constants, expected, found = reduced(
        lambda state: functional.linear(state, weight, bias if has_bias else None), state
    )
    assert found == 1
    assert not products_in(graph)
    assert any(constant is weight.qdata for constant in constants)  # read where they are
    result = graph(state, *constants)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)
    exact = functional.linear(state.double(), weight.dequantize().double(), bias.double() if has_bias else None)
    assert (result - exact).abs().max() <= (expected - exact).abs().max() + 1e-6  # sums are in float32


@pytest.mark.parametrize("is_written", [False, True])
def test_products_with_one_input_share_its_rows_unless_it_is_written_to(is_written):
    weights, state = [quantized(torch.randn(OUT, SIZE)) for _ in range(2)], torch.randn(1, 3, SIZE)

    def function(state):
        read = state + 1
        first = functional.linear(read, weights[0])
        if is_written:
            read[0].mul_(2)
        return first, functional.linear(read, weights[1])

    graph, constants, expected, found = reduced(function, state)
    assert found == 2
    rows = sum(node.target is aten.as_strided.default for node in graph.graph.nodes)
    assert rows == (2 if is_written else 1) * state.shape[1]
    torch.testing.assert_close(graph(state, *constants), expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_weight_that_is_expanded_over_a_batch_is_read_once(batch):
    weight, state = quantized(torch.randn(OUT, SIZE)), torch.randn(SIZE, batch, 2).permute(1, 2, 0)

    def function(state):
        return torch.bmm(state, weight.dequantize().t().expand(batch, SIZE, OUT))

    graph, constants, expected, found = reduced(function, state)
    assert found == 1
    torch.testing.assert_close(graph(state, *constants), expected)


@pytest.mark.parametrize("case", ["many rows", "plain weight", "of the input", "weights of a batch", "scaled bias"])
def test_other_products_stay(case):
    integers, scale = torch.randint(-128, 128, (3, OUT, SIZE), dtype=torch.int8), torch.rand(OUT, 1)
    rows = MAX_ROWS + 1 if case == "many rows" else 3
    state, plain = torch.randn(rows, SIZE), torch.randn(OUT, SIZE)

    def function(state):
        if case == "plain weight":
            return state @ plain.t()
        if case == "of the input":
            return state @ (plain * state.sum()).t()
        if case == "weights of a batch":
            return torch.bmm(state.expand(3, 3, SIZE), (integers * scale).transpose(1, 2))
        weight = (integers[0] * scale).t()
        return torch.addmm(scale.t(), state, weight, beta=2) if case == "scaled bias" else state @ weight

    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(state)
    graph, constants = lift_constants(graph)
    before = products_in(graph)
    assert len(before) == 1
    assert reduce_products(graph, constants) == 0
    assert products_in(graph) == before
    assert not graph.meta.get("inductor_options")
