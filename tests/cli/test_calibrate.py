"""``tide-hf calibrate``: what it passes on, what it writes, and what `inspect` shows of that."""

import json

import pytest
import torch
from records import made_up_record

from tide_hf import TIDERouters
from tide_hf.cli.main import main

SETTINGS = {"data": "texts", "labels": "kl", "max_length": 16, "seed": 0, "dtype": "torch.float32", "seconds": 1.0}


@pytest.fixture
def calibrated(monkeypatch, tiny_llama):
    """Stands in for `calibrate`; holds what it was called with."""
    calls = []

    def calibrate(model, tokenizer, **options):
        calls.append(options)
        return TIDERouters.for_model(model, exit_layers=[2], calibration=made_up_record() | SETTINGS | options["notes"])

    monkeypatch.setattr("tide_hf.cli.calibrate.calibrate", calibrate)
    return calls


def test_only_given_options_are_passed_on(tiny_model_folder, tmp_path, calibrated, capsys):
    command = ["calibrate", str(tiny_model_folder), "--output-dir", str(tmp_path / "new" / "routers")]
    assert main(command) == 0
    folder = {"output_dir": tmp_path / "new" / "routers"}
    told = "tide-hf calibrate tiny-llama --output-dir routers"  # it is published, so without folders
    assert calibrated == [folder | {"notes": {"weights": "a local folder", "command": told}}]
    threads = torch.get_num_threads()
    given = {
        "dataset": "some/texts",
        "samples": 12,
        "max_length": 16,
        "labels": "kl",
        "exit_strategy": "identity",
        "exit_layers": [1, 3],
        "tolerance": 0.05,
        "confidence": 0.9,
        "draft_vocab_size": 64,
        "max_minutes": 1.5,
        "batch_size": 4,
        "seed": 7,
    }
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        command += ["--" + name.replace("_", "-"), text]
    try:
        assert main([*command, "--dtype", "bfloat16", "--threads", "1", "--no-progress"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    notes = calibrated[1].pop("notes")
    assert calibrated[1] == given | folder | {"progress": False}
    assert "--exit-layers 1,3" in notes["command"]
    assert "routers are in" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["weights"] == "a local folder"
    assert "routers are in" in captured.err


def test_the_routers_are_those_that_inspect_shows(tiny_model_folder, tmp_path, capsys):
    routers = tmp_path / "routers"
    options = ["--samples", "24", "--max-length", "10", "--exit-layers", "1,3", "--batch-size", "8", "--labels", "kl"]
    assert main(["calibrate", str(tiny_model_folder), "--output-dir", str(routers), *options]) == 0
    err = capsys.readouterr().err
    for expected in ("Writing text: 0 of ", "1 of 4", "99%", "none", "No threshold could be certified"):
        assert expected in err
    loaded = TIDERouters.from_pretrained(routers)
    assert loaded.exit_layers == [1, 3]
    assert loaded.config.calibration["labels"] == "kl"
    assert loaded.config.calibration["weights"] == "a local folder"
    card = (routers / "README.md").read_text()
    assert f"Command: `{loaded.config.calibration['command']}`" in card
    assert str(tmp_path) not in card.partition("Command:")[2]  # it is published
    assert sorted(file.name for file in routers.iterdir()) == ["README.md", "config.json", "model.safetensors", "plots"]
    assert main(["inspect", str(tiny_model_folder), "--routers", str(routers)]) == 0
    out = capsys.readouterr().out
    for expected in (
        "family       llama",
        "layers       4",
        "parameters   53,792",
        "self_speculative yes",
        "packed weights: ",
        "linear, after layers 1, 3",
        "exit threshold   none: in early_exit no token exits",
        "draft vocabulary 260",
        "1 of 4",
        "within cosine",
    ):
        assert expected in out
