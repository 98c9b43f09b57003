"""``tide-hf calibrate``: what it passes on, what it writes, and what `inspect` shows of that."""

import json

import torch
from records import made_up_record

from tide_hf import TIDERouters
from tide_hf.cli.main import main


def test_only_given_options_are_passed_on(
    tiny_model_folder, tmp_path, tiny_llama, threads_restored, monkeypatch, capsys
):
    calls, record = [], made_up_record() | {"data": "texts"}

    def calibrate(model, tokenizer, **options):
        calls.append(options)
        return TIDERouters.for_model(tiny_llama(), exit_layers=[2], calibration=record | options["notes"])

    monkeypatch.setattr("tide_hf.cli.calibrate.calibrate", calibrate)
    command = ["calibrate", str(tiny_model_folder), "--output-dir", str(tmp_path / "new" / "routers")]
    assert main(command) == 0
    assert "routers are in" in capsys.readouterr().out
    folder = {"output_dir": tmp_path / "new" / "routers"}
    line = "tide-hf calibrate tiny-llama --output-dir routers"  # it is published, so without folders
    assert calls == [folder | {"notes": {"weights": "a local folder", "command": line}}]
    given = {"dataset": "some/texts", "samples": 12, "labels": "kl", "exit_layers": [1, 3], "max_minutes": 1.5}
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        command += ["--" + name.replace("_", "-"), text]
    assert main([*command, "--dtype", "bfloat16", "--threads", "1", "--no-progress", "--json"]) == 0
    assert torch.get_num_threads() == 1
    assert "--exit-layers 1,3" in calls[1].pop("notes")["command"]
    assert calls[1] == given | folder | {"progress": False}
    captured = capsys.readouterr()
    assert json.loads(captured.out)["weights"] == "a local folder"
    assert "routers are in" in captured.err


def test_the_routers_are_those_that_inspect_shows(tiny_model_folder, tmp_path, capsys):
    routers = tmp_path / "routers"
    options = ["--samples", "24", "--max-length", "10", "--exit-layers", "1,3", "--batch-size", "8", "--labels", "kl"]
    assert main(["calibrate", str(tiny_model_folder), "--output-dir", str(routers), *options]) == 0
    err = capsys.readouterr().err
    expected = ("Writing text: 0 of ", "1 of 4", "99%", "none", "No threshold could be certified")
    assert [part for part in expected if part not in err] == []
    loaded = TIDERouters.from_pretrained(routers)
    assert (loaded.exit_layers, loaded.config.calibration["labels"]) == ([1, 3], "kl")
    card = (routers / "README.md").read_text()
    assert f"Command: `{loaded.config.calibration['command']}`" in card
    assert str(tmp_path) not in card.partition("Command:")[2]  # it is published
    assert sorted(file.name for file in routers.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "plots",
        "tide",
    ]
    assert main(["inspect", str(tiny_model_folder), "--routers", str(routers)]) == 0
    out = capsys.readouterr().out
    expected = ("family       llama", "layers       4", "parameters   53,792", "self_speculative yes")
    expected += ("packed weights: ", "linear, after layers 1, 3", "exit threshold   none: in early_exit no token exits")
    expected += ("draft vocabulary 260", "1 of 4", "within cosine")
    assert [part for part in expected if part not in out] == []
