"""Attention of a few queries in C++: what PyTorch's gives, the same for a query whatever stands beside it."""

from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tide_hf.kernels.cpu.cpp_kernels import VALUES
from tide_hf.kernels.cpu.decode_attention import decode_sdpa

# Rows, heads, queries, size, all slots and filled ones.
SHAPES = [
    (1, 3, 12, 64, 96, 50),
    (2, 3, 5, 8, 64, 33),
    (3, 2, 7, 80, 64, 64),
    (1, 1, 1, 5, 40, 1),
    (2, 1, 4, 33, 40, 17),
]

pytestmark = pytest.mark.usefixtures("fresh_kernels")


def tensors(shape, dtype, rows_of_mask=None):
    rows, heads, queries, size, slots, filled = shape
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, heads, length, size).to(dtype) for length in (queries, slots, slots))
    seen = torch.rand(rows_of_mask or rows, 1, queries, slots) < 0.8
    seen[..., 0] = True
    return query, key, value, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(dtype), filled


@pytest.mark.parametrize("dtype", VALUES)
def test_it_is_that_of_pytorch(on_some_cpu, dtype):
    for shape in SHAPES:
        for rows_of_mask, scale in product((None, 1), (None, 0.3)):
            query, key, value, mask, filled = tensors(shape, dtype, rows_of_mask)
            found = decode_sdpa(query, key, value, mask, torch.tensor(filled), scale)
            exact = scaled_dot_product_attention(
                *(tensor.double() for tensor in (query, key[:, :, :filled], value[:, :, :filled])),
                attn_mask=mask[..., :filled].double(),
                scale=scale,
            )
            tolerance = 2e-6 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", VALUES)
def test_a_query_gives_the_same_whatever_stands_beside_it(on_some_cpu, dtype):
    for shape in SHAPES:
        query, key, value, mask, filled = tensors(shape, dtype)
        mask[..., filled - 1 :] = -torch.inf
        mask[..., 0] = 0.0
        found = decode_sdpa(query, key, value, mask, torch.tensor(filled), None)
        last = max(1, filled - 1)
        for i in range(query.shape[2]):
            one = query[:, :, i : i + 1].contiguous(), key, value, mask[:, :, i : i + 1].contiguous()
            alone = decode_sdpa(*one, torch.tensor(last), None)  # nor does what a mask hides at the end matter
            assert torch.equal(alone, found[:, :, i : i + 1])


def test_a_query_that_sees_nothing_gives_zeros():
    query, key, value, mask, filled = tensors(SHAPES[0], torch.float32)
    mask[:, :, 2] = -torch.inf
    found = decode_sdpa(query, key, value, mask, torch.tensor(filled), None)
    assert torch.equal(found[:, :, 2], torch.zeros_like(found[:, :, 2]))
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("what", ["dtype", "other dtypes", "heads", "turned", "mask"])
def test_what_it_is_not_for_is_left_to_pytorch(what):
    query, key, value, mask, filled = tensors(SHAPES[0], torch.float64 if what == "dtype" else torch.float32)
    if what == "other dtypes":
        mask = mask.bfloat16()
    elif what == "heads":
        key = key[:, :1]
    elif what == "turned":
        value = value.transpose(2, 3).contiguous().transpose(2, 3)
    elif what == "mask":
        mask = mask[:, :, :1]
    assert decode_sdpa(query, key, value, mask, torch.tensor(filled), None) is None
