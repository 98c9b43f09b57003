"""`norm_route` against float64."""

import pytest
import reference64
import torch
from reference64 import DTYPES, NORMS, SIZES, norm_route_arguments, strided

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 2e-3}


def check(ops, args, norm, exit_threshold=0.5):
    scores, exit_mask = ops.norm_route(*args, eps=EPS, exit_threshold=exit_threshold, norm=norm)
    expected = reference64.norm_route(*args, EPS, norm)
    assert scores.dtype == torch.float32
    assert exit_mask.dtype == torch.bool
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=TOLERANCE[args[0].dtype])
    assert torch.equal(exit_mask, scores >= exit_threshold)
    return scores, exit_mask


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(ops, device, dtype, norm):
    check(ops, norm_route_arguments(dtype, 3, 127, norm=norm, device=device), norm)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(ops, device, dtype, size):
    check(ops, norm_route_arguments(dtype, 2, size, device=device), "rms")


@pytest.mark.parametrize(("num_rows", "rank"), [(1, 1), (2, 4), (5, 33)])
def test_rows_and_ranks(ops, device, num_rows, rank):
    check(ops, norm_route_arguments(torch.float32, num_rows, 12, rank, device=device), "rms")


def test_many_rows_use_a_matrix_product(ops, device):
    check(ops, norm_route_arguments(torch.bfloat16, 257, 33, 35, device=device), "rms")


def test_norm_in_float32_and_states_in_bfloat16(ops, device):
    for norm in NORMS[:3]:
        args = norm_route_arguments(torch.bfloat16, 3, 33, norm=norm, norm_dtype=torch.float32, device=device)
        check(ops, args, norm)


def test_strided_inputs(ops, device):
    args = norm_route_arguments(torch.bfloat16, 3, 127, norm="layer", device=device)
    plain, _ = check(ops, args, "layer")
    args[:4] = [strided(tensor) for tensor in args[:4]]
    assert not args[0].is_contiguous()
    scores, _ = check(ops, args, "layer")
    torch.testing.assert_close(scores, plain, rtol=0, atol=1e-6)


def test_without_biases(ops, device):
    args = norm_route_arguments(torch.float32, 3, 33, device=device)
    args[4] = args[6] = None
    check(ops, args, "rms")


def test_no_rows(ops, device):
    scores, exit_mask = check(ops, norm_route_arguments(torch.float16, 0, 33, device=device), "rms")
    assert scores.shape == exit_mask.shape == (0,)


@pytest.mark.parametrize(("exit_threshold", "exits"), [(0.0, True), (1.1, False)])
def test_all_or_none_exit(ops, device, exit_threshold, exits):
    _, exit_mask = check(ops, norm_route_arguments(torch.float32, 3, 33, device=device), "rms", exit_threshold)
    assert exit_mask.tolist() == [exits] * 3


def test_results_do_not_vary(ops, device):
    args = norm_route_arguments(torch.float32, 5, 33, 9, device=device)
    first, _ = ops.norm_route(*args, eps=EPS, exit_threshold=0.5)
    again, _ = ops.norm_route(*args, eps=EPS, exit_threshold=0.5)
    assert torch.equal(first, again)


def test_invalid_arguments_are_refused(kernel_module, device):
    args = norm_route_arguments(torch.float32, 3, 33, device=device)
    with pytest.raises(ValueError, match="one of"):
        kernel_module.norm_route(*args, eps=EPS, exit_threshold=0.5, norm="batch")
    args[3] = args[3][:, 1:]
    with pytest.raises(ValueError, match=r"\(R, D\)"):
        kernel_module.norm_route(*args, eps=EPS, exit_threshold=0.5)
