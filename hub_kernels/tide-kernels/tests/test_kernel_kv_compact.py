"""`kv_compact` copies exactly, whichever way slots move."""

import pytest
import torch
from reference64 import DTYPES, SIZES, strided


def cache(rows, slots, size, dtype, device, value_size=None, heads=(2, 3)):
    generator = torch.Generator().manual_seed(slots)
    sizes = size, value_size or size
    return [
        torch.randn(rows, n, slots, width, generator=generator).to(device, dtype)
        for n, width in zip(heads, sizes, strict=True)
    ]


def right_aligned(rows, slots, kept):
    """Orders as in the cache of a batch: each row keeps some slots, padded on the left."""
    generator = torch.Generator().manual_seed(slots)
    width, orders = max(kept), []
    for number in kept[:rows]:
        order = torch.full((width,), -1)
        order[width - number :] = torch.randperm(slots, generator=generator)[:number].sort().values
        orders.append(order)
    return torch.stack(orders)


def check(ops, keys, values, order):
    wanted = keys.clone(), values.clone()
    for got, before in zip(ops.kv_compact(keys, values, order), wanted, strict=True):
        assert got.shape == (*before.shape[:2], order.shape[1], before.shape[3])
        for row in range(order.shape[0]):
            ok = order[row] >= 0
            assert torch.equal(got[row][:, ok], before[row][:, order[row][ok]])


@pytest.mark.parametrize(("slots", "dtype"), [(127, dtype) for dtype in DTYPES] + [(3, DTYPES[0])])
def test_rows_that_keep_different_numbers(ops, device, dtype, slots):
    keys, values = cache(3, slots, 16, dtype, device, value_size=5, heads=(1, 2))
    check(ops, keys, values, right_aligned(3, slots, [slots - 1, slots // 3, slots]).to(device))


@pytest.mark.parametrize("size", SIZES)
def test_sizes(ops, device, size):
    keys, values = cache(1, 7, size, torch.bfloat16, device, heads=(1, 1), value_size=3)
    check(ops, keys, values, right_aligned(1, 7, [5]).to(device))


@pytest.mark.parametrize(
    ("pads", "kept"),
    [(0, [(70, 200)]), (70, [(0, 130)]), (90, [(0, 80), (190, 220)])],
    ids=["left", "right", "both ways"],
)
def test_slots_of_a_row_move(ops, device, pads, kept):
    order = torch.cat([torch.full((pads,), -1), *(torch.arange(*some) for some in kept)])[None]
    check(ops, *cache(1, 220, 8, torch.float32, device, heads=(1, 1)), order.to(device))


def test_slots_that_do_not_move(ops, device):
    check(ops, *cache(2, 70, 8, torch.float32, device, heads=(1, 1)), torch.arange(70).repeat(2, 1).to(device))


def test_strided(ops, device):
    keys, values = cache(2, 33, 6, torch.float16, device, heads=(2, 2))
    keys, values = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (keys, values))
    order = strided(right_aligned(2, 33, [20, 9]).to(device))
    assert not keys.is_contiguous()
    assert not order.is_contiguous()
    check(ops, keys, values, order)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_nothing_to_move(ops, device, shape):
    keys, values = cache(shape[0], 5, 8, torch.float32, device)
    check(ops, keys, values, torch.empty(shape, dtype=torch.int64, device=device))


def test_the_kernel_works_in_place(kernel_module, device):
    keys, values = cache(1, 9, 8, torch.float32, device)
    got, _ = kernel_module.kv_compact(keys, values, torch.tensor([[2, 5, 8]], device=device))
    assert got.data_ptr() == keys.data_ptr()


def test_invalid_arguments_are_refused(kernel_module, device):
    keys, values = cache(2, 5, 8, torch.float32, device)
    with pytest.raises(ValueError, match=r"\(rows, kept\)"):
        kernel_module.kv_compact(keys, values, torch.zeros(2, 6, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="int64"):
        kernel_module.kv_compact(keys, values, torch.zeros(2, 3, dtype=torch.int32, device=device))
