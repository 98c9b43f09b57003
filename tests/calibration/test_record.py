"""The figures of a calibration against their definitions, and the tables that show them."""

import pytest
import torch
from families import tiny_model
from records import made_up_decisions

from tide_hf import TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.calibration.record import coverage_at, layer_sizes, reliability_bins, tolerance_rows
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
    assert (rows[0]["exit_threshold"], rows[0]["depth_fraction"]) == (None, 1.0)
    certified = [row for row in rows if row["exit_threshold"] is not None]
    assert certified
    for row in certified:
        assert row["exit_threshold"] == choose_threshold(made, tolerance=row["tolerance"], confidence=0.9).chosen
        assert row["interval"][0] < row["disagreement"] < row["interval"][1]
        assert row["depth_fraction"] == pytest.approx(made.depth_fraction(row["exit_threshold"]), abs=1e-5)
