"""Layouts of weights: whatever bias_layout weights and biases have, products are those of linear."""

import pytest
import torch
from torch.nn import functional

from tide_hf.kernels.cpu import weight_layouts
from tide_hf.kernels.cpu.weight_layouts import (
    WEIGHT_LAYOUTS,
    PlainWeight,
    PrepackedWeight,
    QuantizedWeight,
    UpcastWeight,
    in_layout,
)

SIZE, SIZE_OUT = 64, 32

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"),
    pytest.mark.usefixtures("fresh_kernels"),
]


@pytest.mark.parametrize("bias_layout", ["strided", "expanded"])
@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
def test_a_bias_may_have_any_layout(layout, bias_layout):
    dtype = torch.float16 if layout is UpcastWeight else torch.float32
    weight, state = torch.randn(SIZE_OUT, SIZE).to(dtype), torch.randn(3, SIZE).to(dtype)
    one = torch.randn(SIZE_OUT, 2).to(dtype)
    bias = one[:, 0] if bias_layout == "strided" else one[:1, 0].expand(SIZE_OUT)
    read = layout(weight)
    assert torch.equal(read.apply(state, bias), read.apply(state, bias.contiguous()))


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
def test_weights_may_be_turned(layout):
    weight, state = torch.randn(SIZE, SIZE_OUT).t(), torch.randn(3, SIZE)
    found, exact = layout(weight).apply(state, None), functional.linear(state, weight)
    if layout is QuantizedWeight:
        assert torch.equal(found, layout(weight.contiguous()).apply(state, None))
    else:
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", [PrepackedWeight, PlainWeight])
@pytest.mark.parametrize("part", ["some rows", "turned"])
def test_weights_at_one_address_are_told_apart(layout, part):
    weight, state = torch.randn(SIZE, SIZE), torch.randn(3, SIZE)
    other = weight[:8] if part == "some rows" else weight.t()
    kept = [in_layout(layout, one) for one in (weight, other)]
    for one in (weight, other):
        found = torch.ops.tide_hf.linear(state, one, None, kept[0].number)
        torch.testing.assert_close(found, functional.linear(state, one), atol=1e-4, rtol=1e-5)
    del kept
    assert weight_layouts._key_of([weight], layout) not in weight_layouts._known
