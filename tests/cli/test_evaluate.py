"""``tide-hf evaluate``: its table, JSON and plot."""

import io
import json
import sys
from unittest.mock import Mock

import pytest
from rich.console import Console
from skipping_calls import random_routers

from tide_hf.cli.main import main
from tide_hf.evaluation.quality import draw_curve, quality_table
from tide_hf.routers.tables import rich_table


def figure(value):
    return {"value": value, "interval": [value - 0.1, value + 0.1]}


ROWS = [
    {"exit_threshold": None, "perplexity": figure(20.0)},
    {"exit_threshold": 0.9, "perplexity": figure(1352.0), "ratio": figure(1.05), "agreement": figure(0.9)}
    | {"depth_fraction": figure(0.8), "exit_rates": {"2": 0.4}},
]
TEXT = {"data": "w.txt", "num_tokens": 1234, "num_documents": 56, "max_length": 64, "rows": ROWS}
RECORD = {"confidence": 0.95, "perplexity": TEXT}


def test_the_command_prints_a_table_or_json_and_draws_a_plot(tmp_path, tiny_model_folder, tiny_llama, capsys):
    random_routers(tiny_llama()).save_pretrained(tmp_path / "routers")
    text, plot = tmp_path / "text.txt", tmp_path / "new" / "curve.png"
    text.write_text("\n\n".join(f"{n} rivers run." for n in range(6)), encoding="utf-8")
    command = ["evaluate", str(tiny_model_folder), "--routers", str(tmp_path / "routers"), "--text", str(text)]
    command += ["--samples", "4", "--max-length", "16", "--batch-size", "2"]
    assert main([*command, "--plot", str(plot), "--thresholds", "0.8,0.5"]) == 0
    out = capsys.readouterr().out
    assert [part for part in ("Perplexity on text.txt", "base", "0.8", "0.5", "4 documents") if part not in out] == []
    assert max(map(len, out.splitlines())) <= 80
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--thresholds", "0.5", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["exit_threshold"] for row in record["perplexity"]["rows"]] == [None, 0.5]
    assert record["command"].startswith("tide-hf evaluate")
    assert (record["routers"], record["weights_origin"]) == (str(tmp_path / "routers"), "a local folder")


def test_a_missing_matplotlib_is_named_before_anything_is_measured(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(["evaluate", "model", "--text", "x.txt", "--plot", "x.png"], "pip install tide-hf[plots]")


def test_the_table_has_figures_with_intervals_and_a_narrow_terminal_truncates_none():
    title, table, _ = quality_table(RECORD)
    assert table.rows[0] == ["base", "20.00", "19.9 to 20.1", "-", "-", "-", "-"]
    assert table.rows[1] == ["0.9", "1352.00", "1351.9 to 1352.1", "1.050", "0.950 to 1.150", "90.0%", "80.0%"]
    console = Console(file=io.StringIO(), width=60)
    console.print(rich_table(title, table))
    assert "\u2026" not in console.file.getvalue()
    assert all(part in console.file.getvalue() for cell in table.rows[1] for part in cell.split(" to "))


def test_the_plot_shows_quality_against_depth():
    axes = Mock()
    draw_curve(axes, TEXT)
    axes.errorbar.assert_called_once()
    assert axes.errorbar.call_args.args == ([80.0], [1.05])
    assert axes.errorbar.call_args.kwargs["yerr"] == [[pytest.approx(0.1)], [pytest.approx(0.1)]]
    assert axes.axhline.call_args_list[0].args == (1.0,)
