"""The card of calibrated routers."""

import sys

import pytest
from families import tiny_model
from huggingface_hub import ModelCard
from records import ROW, made_up_record, record
from repository import SHIPPED

from tide_hf import TIDERouters
from tide_hf.common.errors import ConfigurationError
from tide_hf.routers.card import write_model_card


def card_of(tmp_path, resumed_units=0, **options):
    calibration = record(**options) | {"resumed_units": resumed_units}
    routers = TIDERouters.for_model(
        tiny_model("llama", num_hidden_layers=14), exit_layers=[4, 12], calibration=calibration
    )
    routers.config.base_model_name_or_path = "org/base"
    return ModelCard.load(write_model_card(routers, tmp_path, repo_id="org/base-tide", command="make them"))


def test_the_time_of_a_calibration_that_was_interrupted_is_not_told_as_the_whole(tmp_path):
    assert "12.5 seconds; tide_hf" in card_of(tmp_path).text
    expected = "12.5 seconds in the last of several runs (7 units of the work had been done before); tide_hf"
    assert expected in card_of(tmp_path, resumed_units=7).text


def test_a_licence_is_told_by_who_publishes(tmp_path):
    routers = TIDERouters.for_model(tiny_model("llama", num_hidden_layers=14), exit_layers=[4, 12])
    routers.config.calibration = record()
    card = ModelCard.load(write_model_card(routers, tmp_path, repo_id="org/base-tide", license="mit"))
    assert card.data.license == "mit"


def test_a_card_in_the_folder_that_one_is_in_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    routers = TIDERouters.for_model(tiny_model("llama", num_hidden_layers=14), exit_layers=[4, 12])
    routers.config.calibration = record()
    assert ModelCard.load(write_model_card(routers, ".")).data.model_name == tmp_path.name


def test_front_matter_and_tables(tmp_path):
    card = card_of(tmp_path)
    assert card.data.base_model == "org/base"
    assert card.data.base_model_relation == "adapter"
    assert card.data.library_name == "tide_hf"
    assert card.data.license is None
    assert 'from_pretrained(\n    "org/base",\n    routers="org/base-tide",\n)' in card.text
    assert "| exit layer | agreement | router AUC | calibration error | leaving |\n| ---: |" in card.text
    assert "| 4 of 14 | 25.0% | 0.700 | 0.020 | 12.5% |\n| 12 of 14 |" in card.text
    assert "| 0.9 | 1.00% | 90.0% | yes |" in card.text
    assert "| 0.8 | 1.00% | 80.0% | no |" in card.text
    assert "exit_threshold 0.9 (disagreement below 2.0% with 95% confidence)" in card.text
    assert "Command: `make them`" in card.text


def test_it_says_so_where_nothing_was_certified(tmp_path):
    assert "No threshold could be certified" in card_of(tmp_path, chosen=2.0).text


def test_routers_without_a_record_have_no_card(tmp_path):
    with pytest.raises(ConfigurationError, match=r"got no calibration record\. Expected routers that"):
        write_model_card(TIDERouters.for_model(tiny_model("llama"), exit_layers=[1]), tmp_path)


def test_new_records_have_every_table_and_plot(tmp_path):
    full = record() | made_up_record()
    routers = TIDERouters.for_model(tiny_model("llama", num_hidden_layers=16), exit_layers=[4, 12], calibration=full)
    text = write_model_card(routers, tmp_path).read_text()
    coverage = full["exit_layers"]["12"]["coverage"]
    for expected in (
        "| head parameters | head MB | cost |",
        "| 1,056 | 0.00 |",
        "## Coverage",
        f"| 12 | {coverage['0.99']:.1%} | {coverage['0.98']:.1%} | {coverage['0.95']:.1%} | {coverage['0.90']:.1%} |",
        "picked on these same documents",
        "| tolerance | certified threshold | disagreement | 90% interval | depth |",
        "| 0.5% | none | - | - | 100.0% |",
        f"{full['machine']['cpu']}, {full['machine']['torch_threads']} threads, device cpu.",
        "## Limits",
    ):
        assert expected in text
    assert text.index("| 4 of 16 |") < text.index("| 12 of 16 |")
    for plot in ("exit_depth", "agreement", "reliability", "risk"):
        assert f"](plots/{plot}.png)" in text
        assert (tmp_path / "plots" / f"{plot}.png").is_file()
    assert "Not drawn" not in text


def test_without_matplotlib_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = card_of(tmp_path).text
    assert "Not drawn: matplotlib was not installed (`pip install tide-hf[plots]`)." in text
    assert ".png" not in text
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_the_shipped_routers_still_get_a_card_with_their_layers_in_order(tmp_path):
    text = write_model_card(TIDERouters.from_pretrained(SHIPPED), tmp_path).read_text()
    lines = [line for line in text.splitlines() if " of 30 |" in line]
    assert [int(line.split()[1]) for line in lines] == [16, 24, 28, 1]  # the block last
    assert "None" not in text
    assert "{{" not in text


def test_what_a_record_says_is_neither_markup_nor_code(tmp_path):
    evil = "x\n\n# A title of theirs\n<script>alert(1)</script> [click](javascript:x) {{ 6 * 7 }} {% raw %}"
    routers = TIDERouters.for_model(tiny_model("llama", num_hidden_layers=14), exit_layers=[4, 12])
    routers.config.base_model_name_or_path = 'org/base") or run("evil'
    routers.config.calibration = record() | {"weights": evil, "data": evil, "command": f"`{evil}", "labels": evil}
    card = write_model_card(routers, tmp_path, repo_id="org/tide").read_text()
    assert "\n# A title of theirs" not in card
    assert "[click](" not in card.replace(f"Command: `'{' '.join(evil.split())}`", "")  # where it is code, it is shown
    assert "<script>" not in card.replace(f"Command: `'{' '.join(evil.split())}`", "")
    assert "{{ 6 * 7 }} {% raw %}" in card
    assert '"org/base?) or run(?evil"' in card
    assert ModelCard(card).data.base_model == routers.config.base_model_name_or_path


@pytest.mark.parametrize(
    "wrong",
    [
        {"threshold": "none"},
        {"threshold": {"chosen": 1}},
        {"splits": 3},
        {"num_documents": {"a": []}, "splits": {}},
        {"exit_layers": {"four": ROW}},
        {"command": 7},
    ],
)
def test_a_record_that_is_none_has_no_card(tmp_path, wrong):
    routers = TIDERouters.for_model(tiny_model("llama", num_hidden_layers=14), exit_layers=[4, 12])
    routers.config.calibration = record() | wrong
    with pytest.raises(ConfigurationError, match=r"cannot be shown on a card: got .* Expected the record that tide_hf"):
        write_model_card(routers, tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_links_in_the_folder_are_not_written_through(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "routers" / "plots").mkdir(parents=True)
    for name in ("README.md", "config.json", "model.safetensors", "plots/agreement.png"):
        (tmp_path / "routers" / name).symlink_to(tmp_path / "mine")
    routers = TIDERouters.for_model(tiny_model("llama", num_hidden_layers=14), exit_layers=[4, 12])
    routers.config.calibration = record()
    routers.save_pretrained(tmp_path / "routers")
    write_model_card(routers, tmp_path / "routers")
    assert (tmp_path / "mine").read_text() == "mine"
    assert TIDERouters.from_pretrained(tmp_path / "routers").config.exit_layers == [4, 12]
