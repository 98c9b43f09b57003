"""What Inductor is asked to make of a step's graph."""

import copy

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from tide_hf.engines.steps.step_graphs import VALUES_PER_THREAD, compile_graph


def test_what_was_compiled_once_is_found_on_disk():
    inputs = [torch.randn(3, 5)]
    graph = make_fx(lambda tensor: (tensor.sin() + 1).cos(), tracing_mode="fake")(*inputs)
    torch._dynamo.utils.counters.clear()
    found = [compile_graph(copy.deepcopy(graph), list(inputs))(*inputs) for _ in range(2)]
    torch.testing.assert_close(found, [graph(*inputs)] * 2)
    counted = torch._dynamo.utils.counters["inductor"]
    assert counted["fxgraph_cache_bypass"] == 0
    assert counted["fxgraph_cache_hit"] >= 1


def test_graphs_are_made_for_one_shape():
    inputs = [torch.randn(3, 517)]
    graph = make_fx(lambda tensor: (tensor.sin() + 1).cos(), tracing_mode="fake")(*inputs)
    found, (code,) = run_and_get_code(lambda: compile_graph(copy.deepcopy(graph), inputs)(*inputs))
    torch.testing.assert_close(found, graph(*inputs))
    assert "empty_strided_cpu((3, 517)" in code
    assert ".size()" not in code


@pytest.mark.parametrize("size", [1000, 64 * VALUES_PER_THREAD])
def test_threads_share_what_is_large_alone(size):
    inputs = [torch.randn(size)]
    graph = make_fx(lambda tensor: tensor.sin() + 2, tracing_mode="fake")(*inputs)
    _, (code,) = run_and_get_code(lambda: compile_graph(graph, inputs)(*inputs))
    assert ("#pragma omp parallel" in code) == (size > VALUES_PER_THREAD and torch.get_num_threads() > 1)
