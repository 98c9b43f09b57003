"""`norm_route` against float64."""

import pytest
import reference64
import torch
from reference64 import DTYPES, NORMS, SIZES, norm_route_arguments, strided

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 2e-3}


def check(ops, args, norm):
    scores = ops.norm_route(*args, eps=EPS, norm=norm)
    expected = reference64.norm_route(*args, EPS, norm)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=TOLERANCE[args[0].dtype])
    return scores


F32, F16, BF16 = DTYPES
CASES = [
    *({"dtype": dtype, "num_rows": 3, "size": 127, "norm": norm} for dtype in DTYPES for norm in NORMS),
    *({"dtype": dtype, "num_rows": 2, "size": size} for dtype in DTYPES for size in SIZES),
    *({"dtype": F32, "num_rows": rows, "size": 12, "rank": rank} for rows, rank in [(1, 1), (2, 4), (5, 33)]),
    {"dtype": BF16, "num_rows": 257, "size": 33, "rank": 35},  # many rows use a matrix product
    *({"dtype": BF16, "num_rows": 3, "size": 33, "norm": norm, "norm_dtype": F32} for norm in NORMS[:3]),
    {"dtype": F16, "num_rows": 0, "size": 33},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_dtypes_norms_and_sizes(ops, device, case):
    check(ops, norm_route_arguments(**case, device=device), case.get("norm", "rms"))


def test_strided_inputs(ops, device):
    args = norm_route_arguments(torch.bfloat16, 3, 127, norm="layer", device=device)
    plain = check(ops, args, "layer")
    args[:4] = [strided(tensor) for tensor in args[:4]]
    assert not args[0].is_contiguous()
    scores = check(ops, args, "layer")
    torch.testing.assert_close(scores, plain, rtol=0, atol=1e-6)


def test_without_biases(ops, device):
    args = norm_route_arguments(torch.float32, 3, 33, device=device)
    args[4] = args[6] = None
    check(ops, args, "rms")


def test_results_do_not_vary(ops, device):
    args = norm_route_arguments(torch.float32, 5, 33, 9, device=device)
    assert torch.equal(ops.norm_route(*args, eps=EPS), ops.norm_route(*args, eps=EPS))


def test_invalid_arguments_are_refused(kernel_module, device):
    args = norm_route_arguments(torch.float32, 3, 33, device=device)
    with pytest.raises(ValueError, match="one of"):
        kernel_module.norm_route(*args, eps=EPS, norm="batch")
    args[3] = args[3][:, 1:]
    with pytest.raises(ValueError, match=r"\(R, D\)"):
        kernel_module.norm_route(*args, eps=EPS)
