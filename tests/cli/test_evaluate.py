"""``tide-hf evaluate``: its table, JSON and plot."""

import io
import json
import sys

import pytest
import torch
from axes import Axes
from rich.console import Console

from tide_hf import TIDERouters
from tide_hf.cli.main import main
from tide_hf.evaluation.quality import draw_curve, quality_table
from tide_hf.routers.tables import TextTable, rich_table


def figure(value, spread=0.1):
    return {"value": value, "interval": [value - spread, value + spread]}


def made_up_record(**settings):
    perplexity = [
        {"exit_threshold": None, "perplexity": figure(20.0)},
        {"exit_threshold": 0.9, "perplexity": figure(21.0), "ratio": figure(1.05), "agreement": figure(0.9)}
        | {"depth_fraction": figure(0.8), "exit_rates": {"2": 0.4}},
    ]
    text = {"data": "w.txt", "num_tokens": 1234, "num_documents": 56, "max_length": 64, "rows": perplexity}
    return {"confidence": 0.95, "kv_cache_strategy": "recompute", "perplexity": text} | settings


@pytest.fixture
def evaluate(tmp_path, tiny_model_folder, tiny_llama, capsys):
    """A function that runs the command on a few texts, and returns what goes to standard output."""
    torch.manual_seed(0)
    routers = TIDERouters.for_model(tiny_llama(), exit_layers=[1, 3])
    for layer in routers.exit_layers:
        torch.nn.init.normal_(routers[layer].router.up.weight)
    routers.save_pretrained(tmp_path / "routers")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} rivers run." for n in range(6)), encoding="utf-8")
    command = ["evaluate", str(tiny_model_folder), "--routers", str(tmp_path / "routers"), "--text", str(text)]

    def run(*arguments):
        assert main([*command, "--samples", "4", "--max-length", "16", "--batch-size", "2", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_it_prints_a_table_and_draws_a_plot(evaluate, tmp_path):
    plot = tmp_path / "new" / "curve.png"
    out = evaluate("--plot", str(plot), "--thresholds", "0.8,0.5")
    for expected in ("Perplexity on text.txt", "base", "0.8", "0.5", "4 documents"):
        assert expected in out
    assert max(map(len, out.splitlines())) <= 80
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_has_the_figures_and_their_provenance(evaluate, tmp_path):
    record = json.loads(evaluate("--thresholds", "0.5", "--json"))
    assert [row["exit_threshold"] for row in record["perplexity"]["rows"]] == [None, 0.5]
    assert record["command"].startswith("tide-hf evaluate")
    assert record["routers"] == str(tmp_path / "routers")
    assert record["weights_origin"] == "a local folder"
    assert record["perplexity"]["num_documents"] == 4


def test_a_missing_matplotlib_is_named_before_anything_is_measured(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(["evaluate", "model", "--text", "x.txt", "--plot", "x.png"], "pip install tide-hf[plots]")


def test_the_table_has_figures_with_intervals_and_a_note():
    _, perplexity, note = quality_table(made_up_record())
    assert perplexity.rows[0] == ["base", "20.00", "19.9 to 20.1", "-", "-", "-", "-"]
    assert perplexity.rows[1] == ["0.9", "21.00", "20.9 to 21.1", "1.050", "0.950 to 1.150", "90.0%", "80.0%"]
    assert "1,234 tokens in 56 documents" in note
    assert "95% by resampling documents" in note
    assert "propagate" not in note
    assert "kv_cache_strategy='propagate'" in quality_table(made_up_record(kv_cache_strategy="propagate"))[2]


def test_the_plot_shows_quality_against_depth():
    axes = Axes()
    draw_curve(axes, made_up_record()["perplexity"])
    assert axes.drawn("errorbar") == [([80.0], [1.05])]
    assert axes.options("errorbar")[0]["yerr"] == [[pytest.approx(0.1)], [pytest.approx(0.1)]]
    assert axes.drawn("axhline")[0] == (1.0,)


def test_a_narrow_terminal_wraps_cells_and_truncates_none():
    headings = ["threshold", "perplexity", "interval", "over base", "interval", "agreement", "depth"]
    row = ["0.93", "1352.18", "1233.7 to 1799.5", "1.000", "0.954 to 1.358", "100.0%", "100.0%"]
    console = Console(file=io.StringIO(), width=80)
    console.print(rich_table("Perplexity", TextTable(headings, [row])))
    said = console.file.getvalue()
    assert "…" not in said
    assert all(part in said for cell in row for part in cell.split(" to "))
