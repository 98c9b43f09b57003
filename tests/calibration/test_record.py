"""The figures of a calibration against their definitions, and the tables that show them."""

import pytest
import torch
from families import tiny_model
from records import made_up_decisions, made_up_record

from tide_hf import TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.calibration.record import (
    coverage_at,
    layer_sizes,
    print_report,
    reliability_bins,
    tolerance_rows,
)
from tide_hf.calibration.threshold import choose_threshold


def test_coverage_and_reliability_by_hand():
    scores = torch.tensor([0.9, 0.8, 0.7, 0.7, 0.6])
    agrees = torch.tensor([True, True, True, False, True])
    assert coverage_at(scores, agrees, 0.99) == pytest.approx(2 / 5)
    assert coverage_at(scores, agrees, 0.80) == pytest.approx(1.0)  # beyond the dip to 3/4
    assert coverage_at(scores[:4], agrees[:4], 0.76) == pytest.approx(2 / 4)  # equal scores exit together
    assert coverage_at(scores, ~agrees, 0.5) == 0.0
    assert coverage_at(torch.ones(4), torch.ones(4).bool(), 1.0) == 1.0
    scores = torch.tensor([0.05, 0.15, 0.12, 1.0])
    bins = reliability_bins(scores, torch.tensor([False, True, False, True]))
    assert bins == [[0.05, 0.0, 1], [0.135, 0.5, 2], [1.0, 1.0, 1]]


@pytest.mark.parametrize(("family", "strategy"), [("opt", "identity"), ("gpt2", "linear")])
def test_costs_count_the_weights_that_are_read(family, strategy):
    model = tiny_model(family)
    structure = find_structure(model)
    options = {"exit_layers": [1, 3], "exit_strategy": strategy}
    sizes = layer_sizes(routers := TIDERouters.for_model(model, **options), structure)
    smaller = layer_sizes(TIDERouters.for_model(model, **options, draft_vocab_size=48), structure)
    assert smaller["3"]["cost"] < sizes["3"]["cost"]
    assert [sizes[layer]["head_parameters"] for layer in ("1", "3")] == [32 * 33 if strategy == "linear" else 0] * 2
    assert sizes["1"]["head_mb"] == round(2e-6 * sizes["1"]["head_parameters"], 3)

    def count(*modules):
        return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())

    after = count(structure.norm, structure.projection, structure.head)
    expected = (count(*structure.layers[:3], routers[3]) + after) / (count(*structure.layers) + after)
    assert sizes["3"]["cost"] == pytest.approx(expected, abs=1e-5)
    assert sizes["1"]["cost"] < sizes["3"]["cost"]


def test_tolerances_are_certified_one_by_one():
    made = made_up_decisions()
    rows = tolerance_rows(made, confidence=0.9)
    assert [row["tolerance"] for row in rows] == [0.005, 0.01, 0.02, 0.05, 0.10]
    assert rows[0] == {
        "tolerance": 0.005, "exit_threshold": None, "disagreement": None, "interval": None, "depth_fraction": 1.0
    }  # fmt: skip
    certified = [row for row in rows if row["exit_threshold"] is not None]
    assert certified
    for row in certified:
        assert row["exit_threshold"] == choose_threshold(made, tolerance=row["tolerance"], confidence=0.9).chosen
        assert row["interval"][0] < row["disagreement"] < row["interval"][1]
        assert row["depth_fraction"] == pytest.approx(made.depth_fraction(row["exit_threshold"]), abs=1e-5)


def test_the_tables_are_printed_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    record = made_up_record()
    print_report(record, 16)
    err = capsys.readouterr().err
    assert "…" not in err
    lines = [line.split() for line in err.splitlines()]
    four = next(line for line in lines if line[:3] == ["4", "of", "16"])
    row = record["exit_layers"]["4"]
    assert (four[3], four[7], four[-1]) == (f"{row['agreement']:.1%}", "1,056", f"{row['cost']:.1%}")
    assert ["0.5%", "none", "-", "-", "100.0%"] in lines
