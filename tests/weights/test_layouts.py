"""Layouts of weights: products are those of PyTorch's linear, and the layout that is measured the fastest is chosen."""

import platform

import pytest
import torch
from drafters import use_drafter
from on_steps import LAYERS, OPTIONS, attach_compiled, new_tokens, prompts
from packed_weights import ROUNDING, check_products, set_fastest_layouts
from torch.nn import functional

from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES, build_kernels
from tide_hf.weights import layouts as weight_layouts
from tide_hf.weights import linear_gate
from tide_hf.weights.layouts import (
    WEIGHT_LAYOUTS,
    PlainWeight,
    PrepackedWeight,
    QuantizedWeight,
    UpcastWeight,
    fastest_layout,
    hold_samples,
    in_layout,
)

SUMMED = 1e-6 if platform.machine() not in ("aarch64", "arm64") else 2e-6  # whose vectors take longer sums
SHAPES = [(576, (576, 192, 192)), (40, (7,)), (5000, (133, 5)), (3, (2, 1))]  # size of the input, and of the outputs
SIZE, SIZE_OUT = 64, 32

pytestmark = pytest.mark.usefixtures("fresh_kernels")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_the_skinny_gemm_is_linear_and_rounds_alike_for_any_number_of_rows(on_some_cpu, dtype):
    torch.manual_seed(0)
    for size, sizes in SHAPES:
        weights = [torch.randn(size_out, size).to(dtype) for size_out in sizes]
        check_products(PlainWeight(*weights), torch.cat(weights).double(), dtype, ROUNDING | {torch.float32: SUMMED})


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_rows_of_all_weights(threads):
    before = torch.get_num_threads()
    weights = [torch.randn(size_out, 512) for size_out in (301, 1, 77)]
    layout, state = PlainWeight(*weights), torch.randn(5, 512)
    expected = layout.apply(state, None)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(layout.apply(state, None), expected)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(expected, functional.linear(state, torch.cat(weights)), atol=1e-4, rtol=1e-5)


def test_plain_weights_are_not_copied_and_need_no_aligned_address():
    weight, state = torch.randn(64 * 33 + 3)[3:].view(64, 33), torch.randn(150, 2, 33)
    layout = PlainWeight(weight)
    torch.testing.assert_close(layout.apply(state, None), functional.linear(state, weight), atol=1e-4, rtol=1e-5)
    assert layout.plain[0].data_ptr() == weight.data_ptr()


@needs_onednn
@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
def test_weights_and_biases_may_have_any_strides(layout):
    dtype = torch.float16 if layout is UpcastWeight else torch.float32
    state, weight = torch.randn(3, SIZE).to(dtype), torch.randn(SIZE, SIZE_OUT).to(dtype).t()
    read, biases = layout(weight), torch.randn(SIZE_OUT, 2).to(dtype)
    assert torch.equal(read.apply(state, None), layout(weight.contiguous()).apply(state, None))
    for bias in (biases[:, 0], biases[:1, 0].expand(SIZE_OUT)):
        found = read.apply(state, bias)
        assert torch.equal(found, read.apply(state, bias.contiguous()))
        torch.testing.assert_close(found, functional.linear(state, weight, bias), atol=1e-4, rtol=1e-2)


@needs_onednn
@pytest.mark.parametrize("layout", [PrepackedWeight, PlainWeight])
@pytest.mark.parametrize("part", ["some rows", "transposed"])
def test_weights_at_one_address_are_told_apart(layout, part):
    weight, state = torch.randn(SIZE, SIZE), torch.randn(3, SIZE)
    other = weight[:8] if part == "some rows" else weight.t()
    converted = [in_layout(layout, one) for one in (weight, other)]
    for one in (weight, other):
        found = torch.ops.tide_hf.linear(state, [one], None, converted[0].number)
        torch.testing.assert_close(found, functional.linear(state, one), atol=1e-4, rtol=1e-5)
    del converted
    assert weight_layouts._key_of([weight], layout) not in weight_layouts._known


@pytest.mark.parametrize(
    ("rows", "seconds", "chosen"),
    [
        (63, {PrepackedWeight: 0.95, PlainWeight: 1.0, None: 2.0}, PlainWeight),
        (63, {PrepackedWeight: 0.85, PlainWeight: 1.0, None: 2.0}, PrepackedWeight),
        (63, {PlainWeight: 0.95, None: 1.0}, PlainWeight),
        (64, {PlainWeight: 0.95, None: 1.0}, None),
        (64, {PlainWeight: 0.85, None: 1.0}, PlainWeight),
    ],
    ids=["copy not clearly faster", "copy clearly faster", "memory-bound", "compute-bound", "clearly faster"],
)
def test_copies_and_compute_bound_layouts_have_to_be_clearly_faster(monkeypatch, rows, seconds, chosen):
    monkeypatch.setattr(PrepackedWeight, "serves", lambda *_: True)
    monkeypatch.setattr(weight_layouts, "_seconds_of", lambda layout, *_: seconds[layout])
    layouts = (*tuple(seconds)[:-1], UpcastWeight)  # which does not serve float32
    assert fastest_layout(torch.float32, rows, layouts) is chosen


def test_a_pass_over_several_tokens_rounds_as_passes_over_one_do(tiny_llama, monkeypatch):
    """In compiled steps that read weights as the model stores them, for want of memory for copies."""
    set_fastest_layouts(monkeypatch, order=(PlainWeight, None, *WEIGHT_LAYOUTS[:2]))
    monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)
    model = tiny_llama(num_hidden_layers=LAYERS)
    steps = attach_compiled(model, pack_weights="auto")
    inputs = {**prompts(), **OPTIONS, "output_logits": True, "return_dict_in_generate": True}
    use_drafter(model, "right", [[]])  # drafts nothing
    expected = model.generate(**inputs)
    assert {size for _, _, size in steps._steps} == {1}
    use_drafter(model, "wrong at the last position", new_tokens(expected.sequences), width=4)
    found = model.generate(**inputs)
    assert {size for _, _, size in steps._steps} > {1}
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_writes_that_pytorch_does_not_count_show_in_samples(dtype, has_kernel):
    if has_kernel:
        build_kernels(dtype)
    weights = [torch.randn(sizes).to(dtype) for sizes in ((70, 32), (3, 4), (1, 8))]
    turned = torch.randn(32, 70).to(dtype).t()
    for made in ([QuantizedWeight(weight) for weight in weights], [PlainWeight(turned)], [PlainWeight(weights[0])], []):
        assert hold_samples(made)
        for weight in {id(one): one for layout in made if layout.samples for one in layout.weights}.values():
            for row in {0, len(weight) // 2, len(weight) - 1}:
                before = weight[row].clone()
                weight.data[row] += 1
                assert not hold_samples(made)
                weight.data[row] = before
                assert hold_samples(made)
