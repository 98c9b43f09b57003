"""The figures of a calibration against their definitions, and the tables that show them."""

import json

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
from tide_hf.routers import tables


def test_coverage_by_hand():
    scores = torch.tensor([0.9, 0.8, 0.7, 0.7, 0.6])
    agrees = torch.tensor([True, True, True, False, True])
    assert coverage_at(scores, agrees, 0.99) == pytest.approx(2 / 5)
    assert coverage_at(scores, agrees, 0.80) == pytest.approx(1.0)  # beyond the dip to 3/4
    assert coverage_at(scores[:4], agrees[:4], 0.76) == pytest.approx(2 / 4)  # equal scores exit together
    assert coverage_at(scores, ~agrees, 0.5) == 0.0
    assert coverage_at(torch.ones(4), torch.ones(4).bool(), 1.0) == 1.0


def test_reliability_by_hand():
    scores = torch.tensor([0.05, 0.15, 0.12, 1.0])
    bins = reliability_bins(scores, torch.tensor([False, True, False, True]))
    assert bins == [[0.05, 0.0, 1], [0.135, 0.5, 2], [1.0, 1.0, 1]]


@pytest.mark.parametrize(("family", "strategy"), [("llama", "linear"), ("opt", "identity"), ("gpt2", "linear")])
def test_costs_count_the_weights_that_are_read(family, strategy):
    model = tiny_model(family)
    structure = find_structure(model)
    routers = TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy=strategy)
    sizes = layer_sizes(routers, structure)
    assert [sizes[layer]["head_parameters"] for layer in ("1", "3")] == [32 * 33 if strategy == "linear" else 0] * 2
    assert sizes["1"]["head_mb"] == round(2e-6 * sizes["1"]["head_parameters"], 3)

    def count(*modules):
        return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())

    after = count(structure.norm, structure.projection, structure.head)
    expected = (count(*structure.layers[:3], routers[3]) + after) / (count(*structure.layers) + after)
    assert sizes["3"]["cost"] == pytest.approx(expected, abs=1e-5)
    assert sizes["1"]["cost"] < sizes["3"]["cost"]


def test_a_draft_vocabulary_makes_an_exit_cheaper():
    whole, half = made_up_record(), made_up_record(draft_vocab_size=48)
    assert half["exit_layers"]["4"]["cost"] < whole["exit_layers"]["4"]["cost"]


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


def test_the_record_is_ready_for_json_and_compact():
    record = made_up_record()
    assert json.loads(json.dumps(record)) == record
    assert set(record["exit_layers"]["4"]) == {
        "agreement", "router_auc", "expected_calibration_error", "coverage", "exit_rate", "reliability",
        "head_parameters", "head_mb", "cost",
    }  # fmt: skip
    assert len(json.dumps(record["exit_layers"])) < 2500
    assert record["machine"]["device"] == "cpu"
    assert record["versions"]["torch"] == torch.__version__


def test_the_tables_are_printed_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    record = made_up_record()
    print_report(record, 16)
    err = capsys.readouterr().err
    assert "…" not in err
    lines = [line.split() for line in err.splitlines()]
    four = next(line for line in lines if line[:3] == ["4", "of", "16"])
    row = record["exit_layers"]["4"]
    expected = [f"{row['agreement']:.1%}", f"{row['router_auc']:.3f}", f"{row['expected_calibration_error']:.3f}"]
    assert four[3:] == [*expected, f"{row['exit_rate']:.1%}", "1,056", "0.00", f"{row['cost']:.1%}"]
    coverage = [f"{row['coverage'][precision]:.1%}" for precision in ("0.99", "0.98", "0.95", "0.90")]
    assert ["4", *coverage] in lines
    assert ["0.5%", "none", "-", "-", "100.0%"] in lines
    assert "same documents" in " ".join(err.split())
    assert "exit_threshold" in err


def test_layers_are_sorted_as_numbers():
    record = {"exit_layers": {"12": {"agreement": 0.5}, "4": {"agreement": 0.25}}}
    ((_, table, _),) = tables.tables_of(record, 16)
    assert table.headings == ["exit layer", "agreement"]
    assert table.rows == [["4 of 16", "25.0%"], ["12 of 16", "50.0%"]]


def test_records_have_the_tables_whose_figures_they_hold():
    block = {"layer": 1, "agreement": 0.4125, "confidence_auc": 0.8, "expected_calibration_error": 0.01}
    record = made_up_record() | {"block": block | {"parameters": 4_000_000, "epochs": 6}}
    for given, titles in (
        ({}, []),
        ({"exit_layers": {"2": {}}}, ["Exit layers"]),
        (made_up_record(), ["Exit layers", "Coverage", "Tolerances"]),
    ):
        assert [title for title, _, _ in tables.tables_of(given, 16)] == titles
    (table,) = (table for title, table, _ in tables.tables_of(record, 30) if title == "Block head")
    assert table.rows == [["1 of 30", "41.2%", "0.800", "0.010", "4,000,000", "6"]]
    record["block"]["documents_before"] = 600
    assert any("documents before" in table.headings for _, table, _ in tables.tables_of(record, 30))
