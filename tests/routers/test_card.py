"""The card of calibrated routers, and its plots."""

import json
import sys

import pytest
from draft_heads import draft_head_for
from families import tiny_model
from huggingface_hub import ModelCard
from records import ROW, made_up_record, record
from repository import CARDS, SHIPPED

from tide_hf import TIDERouters
from tide_hf.common.errors import ConfigurationError, MissingPackageError
from tide_hf.routers.card import save_plots, write_model_card


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=16)


@pytest.fixture
def routers_with(model):
    """A function that makes routers with a record of its own."""

    def make(calibration):
        routers = TIDERouters.for_model(model, exit_layers=[4, 12])
        routers.config.base_model_name_or_path, routers.config.calibration = "org/base", calibration
        return routers

    return make


@pytest.mark.usefixtures("without_matplotlib")
def test_the_card_of_older_routers(routers_with, tmp_path):
    file = write_model_card(routers_with(record() | {"command": "make them"}), tmp_path, repo_id="org/base-tide")
    card = ModelCard.load(file)
    assert card.data.base_model == "org/base"
    assert card.data.base_model_relation == "adapter"
    assert card.data.library_name == "tide_hf"
    assert {"early-exit", "tide"} <= set(card.data.tags)
    assert card.data.license is None
    assert {result.metric_name: result.metric_value for result in card.data.eval_results} == {
        "Agreement with the full model at exit layer 4": 0.25,
        "Agreement with the full model at exit layer 12": 0.25,
        "Disagreement with the full model in early_exit at exit_threshold 0.9": 0.01,
        "Share of the layers that run in early_exit at exit_threshold 0.9": 0.9,
    }
    for expected in (
        'from_pretrained(\n    "org/base",\n    routers="org/base-tide",\n)',
        'pipeline("text-generation", model="org/base-tide")',
        "| exit layer | agreement | router AUC | calibration error | exit rate |\n| ---: |",
        "| 4 of 16 | 25.0% | 0.700 | 0.020 | 12.5% |\n| 12 of 16 |",
        "| 0.8 | 1.00% | 80.0% | no |",
        "exit_threshold 0.9 (disagreement below 2.0% with 95% confidence)",
        "Command: `make them`",
        "Not drawn: matplotlib was not installed (`pip install tide-hf[plots]`).",
    ):
        assert expected in card.text
    assert ".png" not in card.text
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.usefixtures("without_matplotlib")
def test_a_resumed_calibration_without_certified_threshold_and_a_licence(routers_with, tmp_path):
    routers = routers_with(record(chosen=2.0) | {"resumed_units": 7})
    card = ModelCard.load(write_model_card(routers, tmp_path, license="mit"))
    assert "12.5 seconds in the last of several runs (7 units of the work had been done before); tide_hf" in card.text
    assert "No threshold could be certified" in card.text
    assert card.data.license == "mit"


def test_new_records_have_every_table_and_plot(routers_with, tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "mine").write_text("mine")
    for name in ("README.md", "plots/agreement.png"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    full = record() | made_up_record()
    text = write_model_card(routers_with(full), tmp_path).read_text()
    for expected in ("| head parameters | head MB | cost |", "## Coverage", "| 0.5% | none | - |", "device cpu."):
        assert expected in text
    for plot in ("exit_depth", "agreement", "reliability", "risk"):
        assert f"](plots/{plot}.png)" in text
        assert (tmp_path / "plots" / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
    assert "Not drawn" not in text
    assert (tmp_path / "mine").read_text() == "mine"  # links are not written through


@pytest.mark.usefixtures("without_matplotlib")
@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_shipped_routers_get_a_card_with_their_layers_in_order(folder, tmp_path):
    routers = TIDERouters.from_pretrained(folder)
    text = write_model_card(routers, tmp_path, repo_id=folder.name).read_text()
    assert text.partition("## Plots")[0] == (folder / "README.md").read_text().partition("## Plots")[0]
    rows = [line for line in text.splitlines() if f" of {routers.config.num_hidden_layers} |" in line]
    assert [int(row.split()[1]) for row in rows] == sorted(routers.exit_layers)
    assert "None" not in text


@pytest.mark.usefixtures("without_matplotlib")
def test_a_draft_head_gets_its_command_for_vllm(model, routers_with, tmp_path):
    assert "vllm" not in write_model_card(routers_with(record()), tmp_path).read_text().lower()
    routers = draft_head_for(model)
    routers.config.base_model_name_or_path, routers.config.base_model_revision = "org/base", "v1"
    routers.config.calibration = record() | {"exit_layers": {"2": ROW}}
    text = write_model_card(routers, tmp_path, repo_id="org/base-tide").read_text()
    options = '{"model": "org/base-tide", "method": "eagle3", "num_speculative_tokens": 3}'
    assert f"```bash\nvllm serve org/base --revision v1 --speculative-config '{options}'\n```" in text
    assert "vLLM uses the draft head alone: not the exit heads, their routers and thresholds." in text
    routers.config.base_model_name_or_path = "org/base\n```\n# A title; rm -rf"
    text = write_model_card(routers, tmp_path, repo_id="org/base-tide").read_text()
    assert "\nvllm serve 'org/base ??? # A title; rm -rf' --revision" in text


@pytest.mark.usefixtures("without_matplotlib")
def test_texts_of_a_record_become_neither_markup_nor_code(routers_with, tmp_path):
    evil = "x\n\n# A title of theirs\n<script>alert(1)</script> [click](javascript:x) {{ 6 * 7 }} {% raw %}"
    routers = routers_with(record() | {"weights": evil, "data": evil, "command": f"`{evil}", "labels": evil})
    routers.config.base_model_name_or_path = 'org/base") or run("evil'
    card = write_model_card(routers, tmp_path, repo_id="org/tide").read_text()
    assert "\n# A title of theirs" not in card
    elsewhere = card.replace(f"Command: `'{' '.join(evil.split())}`", "")  # where it is code, it is shown
    assert "[click](" not in elsewhere
    assert "<script>" not in elsewhere
    assert "{{ 6 * 7 }} {% raw %}" in card
    assert '"org/base?) or run(?evil"' in card
    assert ModelCard(card).data.base_model == routers.config.base_model_name_or_path


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (None, r"got no calibration record\. Expected routers that"),
        (record() | {"splits": 3}, r"cannot be shown on a card: got .* Expected the record that tide_hf"),
        (record() | {"exit_layers": {"four": ROW}}, "cannot be shown on a card"),
    ],
)
def test_records_that_no_calibration_makes_get_no_card(routers_with, tmp_path, calibration, message):
    with pytest.raises(ConfigurationError, match=message):
        write_model_card(routers_with(calibration), tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_an_older_record_gives_the_plots_that_it_can(tmp_path, monkeypatch):
    record = json.loads((SHIPPED / "config.json").read_text())["tide"]["calibration"]
    del record["threshold"]
    for row in record["exit_layers"].values():
        row.pop("reliability", None)
    assert [file.stem for file in save_plots(record, tmp_path)] == ["exit_depth", "agreement"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"got no matplotlib\. Expected .*pip install tide-hf\[plots\]"):
        save_plots(record, tmp_path / "plots")
