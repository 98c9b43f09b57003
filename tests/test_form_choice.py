"""The forms that weights are kept in: which serves what, and which is the fastest."""

import pytest
import torch
from test_linear_gate import let_pay

from tide_hf.depth.linear_gate import ROUNDED
from tide_hf.kernels.cpu import form_choice, weight_forms
from tide_hf.kernels.cpu.form_choice import fastest_form
from tide_hf.kernels.cpu.products import MOST_ROUNDED_ROWS
from tide_hf.kernels.cpu.weight_forms import FORMS, PackedWeight, RoundedWeight, StoredWeight, WidenedWeight

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.mark.parametrize("is_faster", [True, False])
def test_what_is_the_fastest_is_measured_once_for_each_number_of_rows(monkeypatch, is_faster):
    probed = []
    monkeypatch.setattr(form_choice, "_measured", {})
    monkeypatch.setattr(
        form_choice, "least_seconds", lambda *_: probed.append(1) or float(len(probed) % 2 == is_faster)
    )
    expected = PackedWeight if is_faster else None

    def found(dtype, *numbers):
        return [fastest_form(dtype, rows, (PackedWeight,)) for rows in numbers]

    assert found(torch.float32, 0, 1, 3, 63, 9999) == [None, *[expected] * 4]
    assert len(probed) == 2 * 4  # for 1, for 2, for 16, for 256
    assert found(torch.float32, 15) == [expected]
    assert len(probed) == 2 * 5  # for 8 as well
    assert found(torch.float64, 4) == [None]
    assert fastest_form(torch.float32, 4, ()) is None
    assert len(probed) == 2 * 5


@pytest.mark.parametrize("form", [None, *FORMS])
def test_a_measurement_takes_time(form):
    assert form_choice._measure(form, torch.float32, 4) > 0.0


@pytest.mark.parametrize("fastest", [None, *FORMS])
def test_the_fastest_of_all_is_chosen(monkeypatch, fastest):
    others = [form for form in (None, *FORMS) if form is not fastest]
    monkeypatch.setattr(WidenedWeight, "serves", lambda *_: True)
    let_pay(monkeypatch, order=(fastest, *others))
    assert fastest_form(torch.float32, 4, FORMS) is fastest
    if fastest is not None:
        assert fastest_form(torch.float32, 4, tuple(form for form in FORMS if form is not fastest)) is others[0]


@pytest.mark.parametrize(("gain", "chosen"), [(0.95, StoredWeight), (0.85, PackedWeight)])
def test_a_copy_has_to_be_clearly_faster(monkeypatch, gain, chosen):
    seconds = {StoredWeight: 1.0, PackedWeight: gain, None: 2.0}
    key = torch.float32, torch.get_num_threads(), 64
    monkeypatch.setattr(form_choice, "_measured", {(form, *key): seconds[form] for form in seconds})
    assert fastest_form(torch.float32, 100, (PackedWeight, StoredWeight)) is chosen


@pytest.mark.parametrize(
    ("rows", "seconds", "chosen"), [(63, 0.95, StoredWeight), (64, 0.95, None), (64, 0.85, StoredWeight)]
)
def test_for_many_rows_any_form_has_to_be_clearly_faster(monkeypatch, rows, seconds, chosen):
    monkeypatch.setattr(form_choice, "_seconds_of", lambda form, *_: 1.0 if form is None else seconds)
    assert fastest_form(torch.float32, rows, (StoredWeight,)) is chosen


def test_rounded_weights_are_for_few_rows_and_stored_ones_for_any(monkeypatch):
    let_pay(monkeypatch, order=(RoundedWeight, StoredWeight, PackedWeight, None))
    forms = [fastest_form(torch.float32, rows, ROUNDED) for rows in (1, MOST_ROUNDED_ROWS, MOST_ROUNDED_ROWS + 1, 300)]
    assert forms == [RoundedWeight, RoundedWeight, StoredWeight, StoredWeight]


@pytest.mark.parametrize("has_onednn", [True, False])
def test_only_what_onednn_lacks_is_widened(monkeypatch, has_onednn):
    monkeypatch.setattr(weight_forms, "can_pack", lambda _: has_onednn)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert [WidenedWeight.serves(dtype, 1) for dtype in dtypes] == [False, not has_onednn, not has_onednn]
