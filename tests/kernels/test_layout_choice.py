"""The layouts that weights are kept in: which serves what, and which is the fastest."""

import pytest
import torch
from packed_weights import let_pay

from tide_hf.depth.linear_gate import DRAFT_LAYOUTS
from tide_hf.kernels.cpu import layout_choice, weight_layouts
from tide_hf.kernels.cpu.gemm import MAX_QUANTIZED_ROWS
from tide_hf.kernels.cpu.layout_choice import fastest_layout
from tide_hf.kernels.cpu.weight_layouts import (
    WEIGHT_LAYOUTS,
    PlainWeight,
    PrepackedWeight,
    QuantizedWeight,
    UpcastWeight,
)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.mark.parametrize("is_faster", [True, False])
def test_what_is_the_fastest_is_measured_once_for_each_number_of_rows(monkeypatch, is_faster):
    probed = []
    monkeypatch.setattr(layout_choice, "_measured", {})
    monkeypatch.setattr(
        layout_choice, "least_seconds", lambda *_: probed.append(1) or float(len(probed) % 2 == is_faster)
    )
    expected = PrepackedWeight if is_faster else None

    def found(dtype, *numbers):
        return [fastest_layout(dtype, rows, (PrepackedWeight,)) for rows in numbers]

    assert found(torch.float32, 0, 1, 3, 63, 9999) == [None, *[expected] * 4]
    assert len(probed) == 2 * 4  # for 1, for 2, for 16, for 256
    assert found(torch.float32, 15) == [expected]
    assert len(probed) == 2 * 5  # for 8 as well
    assert found(torch.float64, 4) == [None]
    assert fastest_layout(torch.float32, 4, ()) is None
    assert len(probed) == 2 * 5


@pytest.mark.parametrize("layout", [None, *WEIGHT_LAYOUTS])
def test_a_measurement_takes_time(layout):
    assert layout_choice._measure(layout, torch.float32, 4) > 0.0


@pytest.mark.parametrize("fastest", [None, *WEIGHT_LAYOUTS])
def test_the_fastest_of_all_is_chosen(monkeypatch, fastest):
    others = [layout for layout in (None, *WEIGHT_LAYOUTS) if layout is not fastest]
    monkeypatch.setattr(UpcastWeight, "serves", lambda *_: True)
    let_pay(monkeypatch, order=(fastest, *others))
    assert fastest_layout(torch.float32, 4, WEIGHT_LAYOUTS) is fastest
    if fastest is not None:
        assert (
            fastest_layout(torch.float32, 4, tuple(layout for layout in WEIGHT_LAYOUTS if layout is not fastest))
            is others[0]
        )


@pytest.mark.parametrize(("gain", "chosen"), [(0.95, PlainWeight), (0.85, PrepackedWeight)])
def test_a_copy_has_to_be_clearly_faster(monkeypatch, gain, chosen):
    seconds = {PlainWeight: 1.0, PrepackedWeight: gain, None: 2.0}
    key = torch.float32, torch.get_num_threads(), 64
    monkeypatch.setattr(layout_choice, "_measured", {(layout, *key): seconds[layout] for layout in seconds})
    assert fastest_layout(torch.float32, 100, (PrepackedWeight, PlainWeight)) is chosen


@pytest.mark.parametrize(
    ("rows", "seconds", "chosen"), [(63, 0.95, PlainWeight), (64, 0.95, None), (64, 0.85, PlainWeight)]
)
def test_for_many_rows_any_form_has_to_be_clearly_faster(monkeypatch, rows, seconds, chosen):
    monkeypatch.setattr(layout_choice, "_seconds_of", lambda layout, *_: 1.0 if layout is None else seconds)
    assert fastest_layout(torch.float32, rows, (PlainWeight,)) is chosen


def test_quantized_weights_are_for_few_rows_and_plain_ones_for_any(monkeypatch):
    let_pay(monkeypatch, order=(QuantizedWeight, PlainWeight, PrepackedWeight, None))
    layouts = [
        fastest_layout(torch.float32, rows, DRAFT_LAYOUTS)
        for rows in (1, MAX_QUANTIZED_ROWS, MAX_QUANTIZED_ROWS + 1, 300)
    ]
    assert layouts == [QuantizedWeight, QuantizedWeight, PlainWeight, PlainWeight]


@pytest.mark.parametrize("has_onednn", [True, False])
def test_only_what_onednn_lacks_is_widened(monkeypatch, has_onednn):
    monkeypatch.setattr(weight_layouts, "can_pack", lambda _: has_onednn)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert [UpcastWeight.serves(dtype, 1) for dtype in dtypes] == [False, not has_onednn, not has_onednn]
