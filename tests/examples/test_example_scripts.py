"""The scripts and the notebook in `examples/` run as they are, on tiny models."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
from repository import in_two_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import (
    any_model,
    batch,
    calibrate_and_push,
    calibrate_shipped,
    generate_dataset,
    huggingface_pipeline,
    quickstart,
    ray_serve,
    tune_threshold,
)
from tide_hf import TIDERouters
from tide_hf.cli import demo_model
from tide_hf.hub import load as loading

FOLDER = Path(any_model.__file__).parent
README = (FOLDER / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny(tiny_model_folder, routers_folder):
    """Arguments that name a tiny model and its routers."""
    return ["--model", str(tiny_model_folder), "--routers", str(routers_folder), "--max-new-tokens", "12"]


@pytest.mark.parametrize("script", sorted({file.stem for file in FOLDER.glob("*.py")} - {"__init__"}))
def test_every_script_has_a_help_text(script, monkeypatch, capsys):
    if script == "app":
        pytest.importorskip("gradio")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as caught:
        import_module(f"examples.{script}").main()
    assert caught.value.code == 0
    assert f"usage: {script}.py" in capsys.readouterr().out


def test_any_model_and_tune_threshold(tiny, tiny_model_folder, capsys):
    any_model.main([str(tiny_model_folder), "--max-new-tokens", "12"])
    out = capsys.readouterr().out
    assert out.startswith(str(tiny_model_folder))
    assert out.endswith("same tokens\n")
    any_model.main(["--random", "gpt2", "--max-new-tokens", "6"])
    out = capsys.readouterr().out
    assert out.startswith("gpt2:")
    assert out.endswith("same tokens\n")
    tune_threshold.main([*tiny, "--prompt", "abcabcabc", "--thresholds", "1.1", "0"])
    _, never, always = (line.split() for line in capsys.readouterr().out.splitlines())
    assert never == ["1.1", "100%", "0%", "100%"]
    assert int(always[1].rstrip("%")) < 100
    assert always[2] == "92%"  # the prompt's own pass gives the first of twelve tokens


def test_quickstart_pipeline_and_batch(tiny, capsys):
    quickstart.main([*tiny, "abcabcabc"])
    assert "self_speculative: 12 tokens" in capsys.readouterr().out
    huggingface_pipeline.main(tiny)
    out = capsys.readouterr().out
    assert "self_speculative: 12 tokens" in out
    assert "early_exit: 12 tokens" in out
    batch.main(["abcabcabc", "de", *tiny])
    out = capsys.readouterr().out
    assert "> abcabcabc\n" in out
    assert "self_speculative: 24 tokens" in out
    assert out.endswith("Same tokens as plain generate: yes\n")


def test_calibrate_shipped(tiny_model_folder, tmp_path, monkeypatch):
    def load(name, *, dtype):
        model, tokenizer = loading.load_model(tiny_model_folder, dtype=dtype)
        model.weights_origin = f"those of {name}"
        return model, tokenizer

    monkeypatch.setattr(calibrate_shipped.pypi_models, "load", load)
    settings = {"samples": 12, "max_length": 8, "exit_layers": [2], "draft_intermediate_size": 8}
    monkeypatch.setitem(calibrate_shipped.SETTINGS, "org/tiny", settings)
    calibrate_shipped.main(["org/tiny", "--output-dir", str(tmp_path)])
    config = TIDERouters.from_pretrained(tmp_path).config
    assert config.base_model_name_or_path == "org/tiny"
    assert config.draft_head["intermediate_size"] == 8
    assert config.calibration["weights"] == "those of org/tiny"
    assert "Command: `python -m examples.calibrate_shipped org/tiny`" in (tmp_path / "README.md").read_text()


def test_calibrate_and_push(tiny_model_folder, tmp_path, monkeypatch, capsys):
    push = Mock(return_value=SimpleNamespace(commit_url="https://hub/commit"))
    monkeypatch.setattr(TIDERouters, "push_to_hub", push)
    output = tmp_path / "routers"
    calibrate_and_push.main([str(tiny_model_folder), str(output), "--samples", "12", "--push", "org/tide"])
    assert (output / "README.md").is_file()
    assert TIDERouters.from_pretrained(output).exit_layers
    push.assert_called_once_with("org/tide", private=True)
    out = capsys.readouterr().out
    assert "no threshold was certified for early_exit" in out  # a few texts certify nothing
    assert "https://hub/commit" in out


def test_a_replica_of_ray_serve_answers_like_openais_api(tiny_model_folder, routers_folder):
    replica = ray_serve.Replica(str(tiny_model_folder), str(routers_folder), "eager", 1)
    body = {"messages": [{"role": "user", "content": "abcabc"}], "max_tokens": 6}
    answers = [replica.answer(body | {"temperature": temperature}) for temperature in (0, 0, 0.7)]
    assert answers[0] == answers[1]
    assert (answers[0]["choices"][0]["finish_reason"], answers[0]["usage"]["completion_tokens"]) == ("length", 6)
    assert replica.model.last_exit_stats.mode == "self_speculative"


def test_generate_dataset_in_one_process_and_in_two(tiny_model_folder, tmp_path, monkeypatch):
    chats = [{"messages": [{"role": "user", "content": "sea " * i}]} for i in range(1, 4)]
    rows = [{"prompt": f"tide {i} " + "ebb " * i, "id": i} for i in range(4)] + chats
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(tiny_model_folder), "--batch-size", "2", "--max-new-tokens", "6"]
    monkeypatch.setattr(sys, "argv", ["generate_dataset.py", str(source), str(tmp_path / "one"), *options])
    generate_dataset.main()
    in_two_processes(FOLDER / "generate_dataset.py", source, tmp_path / "two", *options)
    answers = []
    for output, num_files in (("one", 1), ("two", 2)):
        files = sorted((tmp_path / output).iterdir())
        assert len(files) == num_files
        answers.append([json.loads(line) for file in files for line in file.read_text().splitlines()])
    assert answers[0] == answers[1]
    assert [{key: row[key] for key in row if key != "answer"} for row in answers[0]] == rows
    model, tokenizer = (kind.from_pretrained(tiny_model_folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer(rows[3]["prompt"], return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answers[0][3]["answer"] == tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_notebook(tiny_model_folder, routers_folder, monkeypatch):
    notebook = json.loads((FOLDER / "notebook.ipynb").read_text(encoding="utf-8"))
    display = ModuleType("IPython.display")
    display.HTML, pages = str, []
    display.display = lambda page, display_id: SimpleNamespace(update=pages.append)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    base = [kind.from_pretrained(tiny_model_folder) for kind in (AutoModelForCausalLM, AutoTokenizer)]
    monkeypatch.setattr(demo_model, "load_demo_model", lambda **options: base)
    monkeypatch.setattr(loading, "shipped_routers", lambda name: str(routers_folder))
    namespace, shown = {}, []
    for cell in (cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        assert cell["outputs"] == []
        *lines, last = "".join(cell["source"]).splitlines()
        exec("\n".join(lines), namespace)
        if last.endswith(";"):
            exec(last, namespace)
        else:
            shown.append(eval(last, namespace))
    assert "full pass: 1<" in pages[0]
    assert len(pages) > 48  # once for each token, and for each round
    assert "self_speculative: 48 tokens" in pages[-1]
    assert shown[0]._repr_png_().startswith(b"\x89PNG")
    assert "early_exit: 48 tokens" in shown[1]
    assert "last_exit_stats" not in vars(namespace["model"])


def test_the_readme_lists_every_example_and_image():
    files = {file.name for kind in ("*.py", "*.ipynb") for file in FOLDER.glob(kind)} - {"__init__.py"}
    assert [file for file in files if f"({file})" not in README] == []
    assert [image for image in FOLDER.glob("images/*") if f"(images/{image.name})" not in README] == []
