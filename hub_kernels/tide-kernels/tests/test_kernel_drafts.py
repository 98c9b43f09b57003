"""`draft_top1` against float64."""

import pytest
import reference64
import torch
from reference64 import DTYPES, SIZES, strided

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4}
REFERENCE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}  # it rounds its logits


def inputs(num_rows, size, vocab_size, dtype, device):
    generator = torch.Generator().manual_seed(vocab_size)
    hidden_states = torch.randn(num_rows, size, generator=generator).to(device, dtype)
    head_weight = torch.randn(vocab_size, size, generator=generator) * 3 / size**0.5
    return hidden_states, head_weight.to(device, dtype)


def check(ops, is_kernel, *args):
    top, log_probability = ops.draft_top1(*args)
    logits, log_probabilities = reference64.draft_top1(*args)
    tolerance = (TOLERANCE if is_kernel else REFERENCE_TOLERANCE)[args[0].dtype]
    assert top.dtype == torch.int64
    assert log_probability.dtype == torch.float32
    chosen = logits.gather(-1, top[:, None]).squeeze(-1)
    torch.testing.assert_close(chosen, logits.amax(dim=-1), rtol=0, atol=tolerance)
    expected = log_probabilities.gather(-1, top[:, None]).squeeze(-1)
    torch.testing.assert_close(log_probability.double(), expected, rtol=0, atol=tolerance)
    return top


@pytest.fixture
def is_kernel(ops, kernel_module):
    return ops is kernel_module


@pytest.mark.parametrize(
    ("num_rows", "size", "vocab_size", "dtype"),
    [
        *((3, size, 127, dtype) for size in SIZES for dtype in DTYPES),
        *((2, 33, vocab_size, dtype) for vocab_size in SIZES for dtype in DTYPES),
        *((num_rows, 33, 70, torch.float32) for num_rows in (0, 1, 17)),
    ],
)
def test_dtypes_and_sizes(ops, is_kernel, device, num_rows, size, vocab_size, dtype):
    check(ops, is_kernel, *inputs(num_rows, size, vocab_size, dtype, device))


def test_strided_with_a_bias(ops, is_kernel, device):
    hidden_states, head_weight = inputs(3, 33, 70, torch.float32, device)
    bias = torch.linspace(-3, 3, 70, device=device)
    plain = check(ops, is_kernel, hidden_states, head_weight, bias)
    assert torch.equal(check(ops, is_kernel, strided(hidden_states), strided(head_weight), strided(bias)), plain)


def test_of_equal_logits_the_first_token(ops, device):
    head_weight = torch.zeros(200, 16, device=device)
    head_weight[[70, 71, 150]] = 1.0
    top, log_probability = ops.draft_top1(torch.ones(2, 16, device=device), head_weight)
    assert top.tolist() == [70, 70]
    expected = -torch.log(3 + 197 * torch.exp(torch.tensor(-16.0)))
    torch.testing.assert_close(log_probability.cpu(), expected.expand(2))


@pytest.mark.parametrize("vocab_size", [6, 70, 200])
def test_of_nan_logits_the_first_token(ops, device, vocab_size):
    """As in PyTorch; and never a token beyond the vocabulary."""
    hidden_states, head_weight = inputs(3, 16, vocab_size, torch.float32, device)
    hidden_states[1] = float("nan")
    top, log_probability = ops.draft_top1(hidden_states, head_weight)
    assert log_probability.isnan().tolist() == [False, True, False]
    assert top[1] == 0
    head_weight[5] = float("nan")
    top, log_probability = ops.draft_top1(hidden_states, head_weight)
    assert log_probability.isnan().all()
    assert top.tolist() == [5, 0, 5]


def test_a_block_of_infinitely_unlikely_tokens(ops, is_kernel, device):
    hidden_states, head_weight = inputs(3, 16, 200, torch.float32, device)
    head_bias = torch.zeros(200, device=device)
    head_bias[64:128] = float("-inf")
    check(ops, is_kernel, hidden_states, head_weight, head_bias)


def test_invalid_arguments_are_refused(kernel_module, device):
    hidden_states, head_weight = inputs(3, 8, 5, torch.float32, device)
    with pytest.raises(ValueError, match="one dtype"):
        kernel_module.draft_top1(hidden_states.half(), head_weight)
    with pytest.raises(ValueError, match=r"\(N, D\) and \(V, D\)"):
        kernel_module.draft_top1(hidden_states, head_weight[:0])
