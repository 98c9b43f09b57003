"""`exit_compact` and `exit_scatter` copy exactly."""

import mmap

import pytest
import torch
from reference64 import DTYPES, SIZES, strided

MASKS = {
    "all": lambda n: torch.ones(n, dtype=torch.bool),
    "none": lambda n: torch.zeros(n, dtype=torch.bool),
    "mixed": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.4,
}


def states(num_rows, size, dtype, device):
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)).to(device, dtype)


def check(ops, hidden_states, exit_mask):
    rows, indices, counts = ops.exit_compact(hidden_states, exit_mask)
    expected = torch.cat([torch.where(~exit_mask)[0], torch.where(exit_mask)[0]])
    assert torch.equal(indices, expected)
    assert torch.equal(rows, hidden_states[expected])
    assert counts.tolist() == [int((~exit_mask).sum()), int(exit_mask.sum())]
    assert counts.dtype == torch.int32
    return rows, indices, counts


@pytest.mark.parametrize(
    ("num_rows", "size", "dtype", "mask"),
    [
        *((19, 127, dtype, mask) for dtype in DTYPES for mask in MASKS),
        *((num_rows, 3, torch.float32, "mixed") for num_rows in (0, *SIZES)),
        *((5, size, torch.bfloat16, "mixed") for size in (0, *SIZES)),
    ],
)
def test_compact(ops, device, num_rows, size, dtype, mask):
    check(ops, states(num_rows, size, dtype, device), MASKS[mask](num_rows).to(device))


def test_compact_strided(ops, device):
    hidden_states, exit_mask = states(19, 33, torch.float16, device), MASKS["mixed"](19).to(device)
    check(ops, strided(hidden_states), exit_mask)
    check(ops, hidden_states, torch.stack([exit_mask, ~exit_mask], dim=1)[:, 0])


def far_apart(device):
    """Rows whose last column is more than 2^31 values behind the first; the gap takes no memory."""
    stride, numel = 2**30 + 5, 2**31 + 64
    if device.type == "cuda":
        stored = torch.zeros(numel, dtype=torch.uint8, device=device)
    else:
        stored = torch.frombuffer(mmap.mmap(-1, numel), dtype=torch.uint8)
    return stored.as_strided((2, 3), (7, stride))


def test_offsets_beyond_32_bits(ops, device):
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8, device=device)
    out = far_apart(device)
    ops.exit_scatter(rows, torch.tensor([1, 0], device=device), out)
    assert out.tolist() == [[4, 5, 6], [1, 2, 3]]
    check(ops, out, torch.tensor([True, False], device=device))


@pytest.mark.parametrize("size", [0, *SIZES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_restores_the_order(ops, device, dtype, size):
    hidden_states = states(19, size, dtype, device)
    rows, indices, _ = check(ops, hidden_states, MASKS["mixed"](19).to(device))
    out = torch.full_like(hidden_states, float("nan"))
    assert ops.exit_scatter(rows, indices, out) is out
    assert torch.equal(out, hidden_states)


def test_scatter_of_some_rows_into_a_strided_tensor(ops, device):
    hidden_states, exit_mask = states(19, 33, torch.float32, device), MASKS["mixed"](19).to(device)
    rows, indices, counts = check(ops, hidden_states, exit_mask)
    out = strided(torch.zeros(19, 33, device=device))
    ops.exit_scatter(strided(rows), strided(indices), out, limit=counts[:1])
    assert torch.equal(out, torch.where(exit_mask[:, None], 0.0, hidden_states))


def test_scatter_of_no_rows(ops, device):
    out = torch.ones(3, 5, device=device)
    ops.exit_scatter(out[:0], torch.empty(0, dtype=torch.int64, device=device), out)
    assert torch.equal(out, torch.ones(3, 5, device=device))


def test_invalid_arguments_are_refused(kernel_module, device):
    rows, indices = torch.zeros(3, 5, device=device), torch.arange(3, device=device)
    with pytest.raises(ValueError, match=r"\(N, D\) and \(N,\)"):
        kernel_module.exit_compact(rows, torch.zeros(4, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match="as the rows"):
        kernel_module.exit_scatter(rows, indices, rows.half())
    with pytest.raises(ValueError, match="bool"):
        kernel_module.exit_compact(rows, torch.zeros(3, dtype=torch.int32, device=device))
    limit = torch.tensor([2], device=device)
    for given in ((rows, indices.int(), rows), (rows, indices, rows, limit)):
        with pytest.raises(ValueError, match="int64 indices, an int32 limit"):
            kernel_module.exit_scatter(*given)
