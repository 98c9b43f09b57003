"""Logs of operations: equal where two functions do the same."""

import torch

from tide_hf.engines.steps.operation_log import OperationLog


def test_logs_tell_apart_what_differs():
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
