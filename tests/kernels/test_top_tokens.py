"""The largest logits by the kernel are PyTorch's."""

import math

import pytest
import torch

from tide_hf.base_model.unembed import MOST_TOP, greedy_tokens, likeliest_tokens, top_tokens
from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES, build_kernels, load_op


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("size", [3, 17, 130, 40_000])
@pytest.mark.parametrize("rows", [1, 3])
def test_best_tokens_and_their_probabilities(on_some_cpu, dtype, size, rows):
    build_kernels(dtype)
    torch.manual_seed(0)
    logits = (8 * torch.randn(2, rows, size)).to(dtype)
    for count in {1, min(8, size), min(MOST_TOP, size)}:
        values, tokens = top_tokens(logits, count)
        assert values.dtype is dtype
        assert torch.equal(values, logits.gather(-1, tokens))
        assert torch.equal(values.float(), logits.float().topk(count).values)
        found, chosen = likeliest_tokens(logits, count)
        assert torch.equal(chosen, tokens)
        torch.testing.assert_close(found, logits.float().log_softmax(-1).gather(-1, tokens), atol=2e-3, rtol=1e-4)
    assert torch.equal(greedy_tokens(logits), logits.float().argmax(-1))


def test_of_equal_logits_the_first_is_taken_and_nan_before_all(fresh_kernels):
    build_kernels(torch.float32)
    logits = torch.zeros(4, 300)
    logits[1, [40, 41, 250]] = 5.0
    logits[2, [70, 200]] = math.nan
    logits[3] = -math.inf
    assert greedy_tokens(logits).tolist() == [0, 40, 70, 0]
    assert top_tokens(logits, 4)[1].tolist() == [[0, 1, 2, 3], [40, 41, 250, 0], [70, 200, 0, 1], [0, 1, 2, 3]]


def test_many_tokens_and_empty_batches(fresh_kernels):
    build_kernels(torch.float32)
    logits = torch.randn(2, 500)
    assert torch.equal(top_tokens(logits, MOST_TOP + 1)[0], logits.topk(MOST_TOP + 1).values)
    values, tokens, sums = load_op("top_tokens", torch.float32)(torch.empty(0, 9), 2, True)
    assert (values.shape, tokens.shape, sums.shape) == ((0, 2), (0, 2), (0, 1))
