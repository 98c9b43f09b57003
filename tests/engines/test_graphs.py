"""Logs of operations, and graphs compiled with Inductor."""

import copy

import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from tide_hf.engines.steps.graphs import OperationLog, compile_graph


def test_logs_are_equal_for_functions_that_compute_the_same():
    one, other = torch.rand(3), torch.rand(3)

    def key(function, *inputs):
        with OperationLog(list(inputs)) as log:
            function(*inputs)
        return log.key

    assert key(lambda x: x + one, other) == key(lambda x: x + other, one)
    expected = key(lambda x: x * 2.0 + one, other)
    for function in (
        lambda x: x * 2.5 + one,
        lambda x: x * 2.0 + x,
        lambda x: x * 2.0 - one,
        lambda x: x * 2.0 + one[:1],
        lambda x: x * 2.0 + one.double(),
        lambda x: one * 2.0 + x,
    ):
        assert key(function, other) != expected


def test_compiled_graphs_are_for_one_shape_and_found_on_disk():
    inputs = [torch.randn(3, 517)]
    graph = make_fx(lambda tensor: (tensor.sin() + 1).cos(), tracing_mode="fake")(*inputs)
    torch._dynamo.utils.counters.clear()
    first, (code,) = run_and_get_code(lambda: compile_graph(copy.deepcopy(graph), inputs)(*inputs))
    second = compile_graph(copy.deepcopy(graph), inputs)(*inputs)
    torch.testing.assert_close([first, second], [graph(*inputs)] * 2)
    assert "empty_strided_cpu((3, 517)" in code
    assert ".size()" not in code
    counted = torch._dynamo.utils.counters["inductor"]
    assert counted["fxgraph_cache_bypass"] == 0
    assert counted["fxgraph_cache_hit"] >= 1
