"""Float32 weights read in fewer bits: found from the values, exact, and given up where a value would change."""

import pytest
import torch
from packed_weights import check_products

from tide_hf.weights.lossless import HalfWeight, LayoutError, RequantizedWeight


def scales_like(groups, bits=10):
    """Positive scales (groups, 1) with `bits` bits after the first."""
    return (torch.randint(1 << bits, 2 << bits, (len(groups), 1)) * 2.0 ** -(bits + 9)).float()


def of_gguf(sizes, kind, group=32):
    """Weights as transformers dequantises the types of GGUF."""
    groups = torch.empty(sizes).view(-1, group)
    scales = scales_like(groups)
    if kind in ("Q4_1", "Q5_1"):
        top = 15 if kind == "Q4_1" else 31
        integers = torch.randint(0, top + 1, groups.shape).float()
        integers[:, 0], integers[:, 1] = 0, top  # as the quantiser spreads them
        groups = scales * integers - 8 * scales_like(groups)
    elif kind == "Q4_K":  # some groups do not use all steps
        scales, integers = scales * scales_like(groups, 5), torch.randint(0, 12, groups.shape).float()
        integers[:, 0], integers[:, 1], integers[:, 2] = 0, 11, 5
        groups = scales * integers - 8 * scales_like(groups) * scales_like(groups, 5)
    elif kind == "Q8_0":
        integers = torch.randint(-127, 128, groups.shape).float()
        integers[:, 0] = 127
        groups = scales * integers
    elif kind == "Q6_K":  # products that float32 rounds
        integers = torch.randint(-32, 32, groups.shape).float()
        integers[:, 0], integers[:, 1], integers[:, 2] = -32, 31, 30
        groups = scales * torch.randint(64, 128, (len(groups), 1)) * integers
    elif kind == "Q4_K of two values":  # near 0 and minus the zero
        zeros = scales * scales_like(groups, 5)
        steps = ((zeros / 11).view(torch.int32) & -128).view(torch.float32)  # of 17 bits
        groups = torch.where(torch.rand(groups.shape) < 0.5, steps * 11 - zeros, -zeros)
    else:
        groups = (scales * scales_like(groups, 5)).expand_as(groups)
    return groups.reshape(sizes).contiguous()


OF_BITS = {"Q4_1": (torch.uint8,), **dict.fromkeys(("Q5_1", "Q6_K", "Q8_0"), (torch.int8,))}
KINDS = ("Q4_1", "Q5_1", "Q4_K", "Q8_0", "Q6_K", "Q4_K of two values", "one value")


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", [torch.float32])
def test_products_are_the_plain_weights_and_round_alike_for_any_number_of_rows(dtype):
    torch.manual_seed(0)
    for size, size_out in ((576, 192), (4864, 33), (40, 7), (3, 2)):
        for stored in (torch.bfloat16, torch.float16):
            weight = torch.randn(size_out, size).to(stored).to(dtype)
            if stored is torch.bfloat16 and size % 2:
                with pytest.raises(LayoutError):  # panels hold pairs of columns
                    HalfWeight(weight)
                continue
            layout = HalfWeight(weight)
            assert layout.values.dtype is stored
            check_products(layout, weight.double(), dtype)
    for kind in KINDS:
        weight = of_gguf((24, 576), kind)
        check_products(RequantizedWeight(weight), weight.double(), torch.float32)


@pytest.mark.parametrize("group", [32, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_integers_of_gguf_are_found_again(kind, group):
    torch.manual_seed(0)
    weight = of_gguf((48, 480), kind, group)
    layout = RequantizedWeight(weight)
    columns = layout.apply(torch.eye(480), None).T  # each weight alone, rounded once by a fused multiply-add
    assert torch.equal(columns, weight)
    assert layout.values.dtype in OF_BITS.get(kind, (torch.uint8, torch.int8))
    assert layout.scales.shape[1] >= 480 // 32


def with_value(weight, value):
    weight = weight.clone()
    weight[-1, -1] = value
    return weight


@pytest.mark.parametrize("value", [0.1, 1e-9, 1e9, torch.nan])
def test_one_value_that_needs_more_bits_is_seen(value):
    torch.manual_seed(0)
    half = torch.randn(64, 96).half().float()
    for weight in (half, half.bfloat16().float()):
        with pytest.raises(LayoutError):
            HalfWeight(with_value(weight, 0.1 if value is torch.nan else value))
    grid = of_gguf((4096, 96), "Q4_1")
    for weight in (with_value(grid, value), grid + torch.randn(grid.shape) * 1e-6, torch.randn(64, 96)):
        with pytest.raises(LayoutError):
            RequantizedWeight(weight)
    for weight in (half, half.bfloat16().float(), torch.randn(4, 40), torch.randn(0, 32)):  # which halves suit better
        with pytest.raises(LayoutError):
            RequantizedWeight(weight)


def test_more_steps_than_int8_has_are_refused():
    torch.manual_seed(0)
    integers = torch.randint(0, 256, (512, 32)).float()
    integers[:, 0], integers[:, 1], integers[:, 2] = 0, 255, 254
    with pytest.raises(LayoutError):
        RequantizedWeight(scales_like(integers) * integers - 300 * scales_like(integers))


def test_weights_of_any_strides_are_read():
    torch.manual_seed(0)
    weight = torch.randn(96, 64).bfloat16().float().T
    check_products(HalfWeight(weight), weight.double(), torch.float32)
    weight = of_gguf((96, 128), "Q8_0")[:, :64]
    check_products(RequantizedWeight(weight), weight.double(), torch.float32)
