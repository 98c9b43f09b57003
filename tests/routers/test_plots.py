"""The plots of a calibration record."""

import json
import sys

import pytest
from axes import Axes
from records import made_up_record
from repository import SHIPPED

from tide_hf.common.errors import MissingPackageError
from tide_hf.routers.card import PLOTS, save_plots


def test_every_plot_is_a_png(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    files = save_plots(made_up_record(), tmp_path / "plots")
    assert [file.name for file in files] == ["exit_depth.png", "agreement.png", "reliability.png", "risk.png"]
    assert sorted(files) == sorted((tmp_path / "plots").iterdir())
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot  # it holds global state


def test_an_older_record_gives_the_plots_that_it_can(tmp_path):
    record = json.loads((SHIPPED / "config.json").read_text())["calibration"]
    del record["threshold"]
    for row in record["exit_layers"].values():
        row.pop("reliability", None)
    assert [file.stem for file in save_plots(record, tmp_path)] == ["exit_depth", "agreement"]
    assert save_plots({}, tmp_path) == []


def test_what_the_plots_show():
    record = made_up_record()
    drawn = {name: Axes() for name in PLOTS}
    for name, (draw, _) in PLOTS.items():
        draw(drawn[name], record)
    layers = record["exit_layers"]
    labels, heights = drawn["exit_depth"].drawn("bar")[0]
    assert labels == ["4", "12", "none"]
    assert heights[:2] == [100 * layers[layer]["exit_rate"] for layer in ("4", "12")]
    assert sum(heights) == pytest.approx(100)
    assert drawn["agreement"].drawn("plot") == [([4, 12], [100 * layers[n]["agreement"] for n in ("4", "12")])]
    reliability = drawn["reliability"].drawn("plot")
    assert [list(zip(*curve, strict=True)) for curve in reliability[:2]] == [
        [(score, share) for score, share, _ in layers[layer]["reliability"]] for layer in ("4", "12")
    ]
    table = record["threshold"]["table"]
    certified, others = drawn["risk"].drawn("plot")
    assert certified[0] == [row["exit_threshold"] for row in table if row["certified"]]
    assert others[1] == [100 * row["disagreement"] for row in table if not row["certified"]]


def test_many_layers_are_thinned_out():
    row = made_up_record()["exit_layers"]["4"]
    axes = Axes()
    PLOTS["reliability"][0](axes, {"exit_layers": {str(layer): row for layer in range(1, 31)}})
    assert 4 <= len(axes.drawn("plot")) - 1 <= 8


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"got no matplotlib\. Expected .*pip install tide-hf\[plots\]"):
        save_plots(made_up_record(), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()
