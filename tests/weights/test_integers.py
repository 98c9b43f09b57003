"""Weights that another package has quantised to integers: found, multiplied as they are stored, and followed."""

import pytest
import torch
from packed_weights import check_products
from quantized_weights import packed_int4, quantized, scaled
from torch import nn
from torch._subclasses import FakeTensorMode

from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES, load_op
from tide_hf.weights.integers import IntegerWeight, PanelIntegers, integers_of
from tide_hf.weights.panels import LayoutError, int4_in_panels, scales_in_panels


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_products_are_those_of_the_scaled_integers_and_round_alike_for_any_number_of_rows(dtype):
    torch.manual_seed(0)
    for size, size_out, groups in ((576, 192, 18), (5000, 33, 1), (48, 7, 3), (96, 5, 1), (40, 7, 1), (3, 2, 1)):
        integers, scales = torch.randint(-128, 128, (size_out, size), dtype=torch.int8), torch.rand(size_out, groups)
        wide = integers.double(), scales.double()
        check_products(IntegerWeight(integers, scales), scaled(*wide, torch.zeros(())), dtype)
        if size % (16 * groups) == 0:
            zeros = torch.randint(-128, 128, (size_out, groups), dtype=torch.int8)
            check_products(IntegerWeight(integers, scales, zeros), scaled(*wide, -(zeros * scales.double())), dtype)


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_products_with_panels_of_integers_are_those_of_the_scaled_integers(dtype):
    torch.manual_seed(0)
    for size, size_out, groups in ((576, 192, 1), (5056, 33, 1), (200, 70, 1), (576, 192, 9), (192, 33, 6), (48, 7, 3)):
        integers, scales = torch.randint(-128, 128, (size_out, size), dtype=torch.int8), torch.rand(size_out, groups)
        exact = scaled(integers.double(), scales.double(), torch.zeros(()))
        check_products(PanelIntegers(integers, scales), exact, dtype)
    with pytest.raises(LayoutError):
        PanelIntegers(torch.ones(4, 6, dtype=torch.int8), torch.ones(4))


def random_integers(bits, *sizes):
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), sizes, dtype=torch.int8)


def panels_of(bits, integers, scales):
    layout = PanelIntegers(integers, scales)
    if bits == 4:
        layout.values, layout.scales = int4_in_panels(integers + 8), scales_in_panels(scales, -8 * scales)
    return layout


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize(("bits", "groups"), [(8, 1), (8, 4), (4, 4)])
def test_rows_of_any_magnitude_are_multiplied_as_exactly_as_others(dtype, bits, groups):
    torch.manual_seed(0)
    integers, scales = random_integers(bits, 64, 128), torch.rand(64, groups) / 2**bits
    layout, weight = panels_of(bits, integers, scales), scaled(integers.double(), scales.double(), torch.zeros(()))
    least, most = torch.finfo(dtype).tiny ** 0.75, torch.finfo(dtype).max / 128**2
    state = torch.randn(12, 128)
    state = torch.stack([state[0] * least, state[1] * most / 8, 0 * state[2], *state[3:]]).to(dtype)
    state[3, 5] = 1000  # beside which others are small
    state[4, ::2] = 0
    found, exact = layout.apply(state, None).double(), state.double() @ weight.t()
    largest = state.double().abs().amax(dim=1) * weight.abs().amax() * 128**0.5
    assert ((found - exact).abs().amax(dim=1) <= 2 * torch.finfo(dtype).eps * largest).all()
    state[5, 7], state[6, 0], state[7, 127] = torch.nan, torch.inf, -torch.inf
    broken = layout.apply(state, None)
    assert not broken[5:8].isfinite().any()
    assert torch.equal(broken[:5], found[:5].to(dtype))
    assert torch.equal(broken[8:], found[8:].to(dtype))


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize("group", [16, 32, 96])
def test_the_largest_values_of_fixed_point_are_multiplied_exactly(dtype, group):
    torch.manual_seed(0)
    integers, scales = random_integers(4, 32, 96), torch.rand(32, 96 // group)
    layout, weight = panels_of(4, integers, scales), scaled(integers.double(), scales.double(), torch.zeros(()))
    state = torch.rand(6, 96) * 2 - 1
    for largest in (0.5, 1 - 2.0**-24, *torch.linspace(0.98, 1, 41).tolist()):  # just below a power of two
        for sign in (-1, 1):
            state[:5].view(5, -1, 8)[:, :, :5] = torch.eye(5)[:, None] * sign * largest
            state[5] = sign * largest
            check_products_of(layout, weight, state)


def check_products_of(layout, weight, state):
    found, exact = layout.apply(state, None), state.double() @ weight.t()
    assert float((found.double() - exact).abs().max()) <= 2e-6 * float(exact.abs().max())
    assert torch.equal(found, torch.cat([layout.apply(row, None) for row in state.split(1)]))


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_int4_products_are_those_of_the_scaled_integers(dtype):
    torch.manual_seed(0)
    for size, size_out, group in ((576, 192, 32), (128, 64, 128), (512, 128, 16)):
        integers, scales = torch.randint(-8, 8, (size_out, size)), torch.rand(size // group, size_out, 2)
        exact = scaled(integers.double(), *scales.double().permute(2, 1, 0))
        check_products(IntegerWeight(packed_int4(integers), scales), exact, dtype)


@pytest.mark.usefixtures("on_some_cpu")
@pytest.mark.parametrize("dtype", [torch.float32])
def test_int4_is_read_where_pytorch_packs_it_in_the_kernels_way(dtype):
    integers = torch.randint(-8, 8, (64, 32))
    of_pytorch = torch.ops.aten._convert_weight_to_int4pack_for_cpu((integers + 8).int(), 1)
    is_read = torch.equal(of_pytorch, packed_int4(integers))
    assert load_op("skinny_gemm", dtype) is not None
    with FakeTensorMode():  # first asked in a trace
        assert IntegerWeight.serves(dtype, 1, torch.uint8) == is_read


def linear(package="torchao", kind="rows", sizes=(6, 4), **attributes):
    found = nn.Linear(*sizes)
    found.weight = quantized(found.weight, package, kind)
    for name, value in attributes.items():
        setattr(found.weight, name, value)
    return found


@pytest.mark.parametrize("package", ["torchao", "optimum"])
def test_integers_and_scales_are_the_packages_own_tensors(package):
    layer = linear(package)
    integers, scales = integers_of(layer)
    assert integers is layer.weight.qdata
    assert scales is layer.weight.scale
    assert integers_of(linear(package, scale=torch.rand(4, 2), _scale=torch.rand(4, 2))) is None  # of three integers
    assert integers_of(linear(package, qdata=torch.rand(4, 6), _data=torch.rand(4, 6))) is None  # 8 bits, floating
    meta = torch.empty(4, 6, dtype=torch.int8, device="meta")
    assert integers_of(linear(package, qdata=meta, _data=meta)) is None
    assert integers_of(nn.Linear(6, 4)) is None
    assert integers_of(linear("elsewhere")) is None


def test_groups_and_zero_points_are_found_where_the_kernel_can_read_them():
    sizes = 32, 64
    assert len(integers_of(linear(kind="groups", sizes=sizes))) == 2
    assert len(integers_of(linear(kind="zeros", sizes=sizes))) == 3
    assert len(integers_of(linear(kind="zeros", sizes=sizes, zero_point=torch.zeros(64, 2)))) == 2
    assert integers_of(linear(kind="zeros", sizes=sizes, zero_point=torch.ones(64, 1))) is None
    assert integers_of(linear(kind="groups", sizes=sizes, scale=torch.rand(64, 4))) is None  # of eight integers
    assert integers_of(linear(zero_point=torch.ones(4, 1))) is None  # of six integers
    layer = linear(kind="int4", sizes=sizes)
    assert integers_of(layer) == (layer.weight.qdata, layer.weight.scale_and_zero)
    assert integers_of(linear(kind="int4", sizes=(32, 48))) is None
    assert integers_of(linear(kind="int4", sizes=sizes, act_mapping_type="asymmetric")) is None


def test_layers_that_quantise_their_input_are_left_alone():
    assert integers_of(linear(act_quant_kwargs=object())) is None
    assert integers_of(linear(activation_quantization="asymmetric")) is None
    assert integers_of(linear("optimum", axis=1)) is None
    layer = linear("optimum")
    layer.activation_qtype = "qint8"
    assert integers_of(layer) is None
