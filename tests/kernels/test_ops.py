"""Which kernels a model runs, where they come from, and what is refused before any of their code runs.

What the kernels compute is tested in hub_kernels/.
"""

import copy
import json
import logging
import pickle
import shutil
import sys

import pytest
import torch
from families import ATTENTION, tiny_model

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import find_structure
from tide_hf.common.errors import ConfigurationError, KernelError
from tide_hf.kernels import fetch, ops
from tide_hf.kernels import reference as reference_ops

pytest.importorskip("triton")
REPO = fetch.KERNELS_REPO
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="about machines without a GPU")
MD5 = {"algorithm": "md5", "files": {}}


def edit_metadata(variant, **changes):
    path = variant / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(**arguments):
    with pytest.raises(KernelError) as caught:
        ops.load_kernels(use_kernels=True, **arguments)
    assert "Expected an NVIDIA GPU" in str(caught.value)
    return str(caught.value)


@on_cpu
def test_auto_on_a_cpu_logs_once_why_there_are_no_kernels_yet(caplog, local_kernels, fresh_kernels, tiny_llama):
    ops._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="tide_hf"):
        for _ in range(2):
            model = TIDEModelForCausalLM.attach(tiny_llama())
    (record,) = [record for record in caplog.records if record.name == "tide_hf.kernels.ops"]
    assert record.levelno == logging.INFO
    assert record.message == f"C++ kernels for this CPU: not found ready-made ({REPO} has no build for this CPU)"
    assert model._tide.unembed.ops.kernels is None  # although Triton's interpreter could run them


def test_use_kernels_is_false_auto_or_true(monkeypatch, tiny_model_folder):
    with pytest.raises(ConfigurationError, match="unknown use_kernels"):
        TIDEModelForCausalLM.from_pretrained("no/such/model", use_kernels="always")
    monkeypatch.setattr(ops, "_obstacle", None)  # the device does not matter
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder, use_kernels=False)
    assert pickle.loads(pickle.dumps(model._tide.unembed.ops)) is ops.WITHOUT_KERNELS


@on_cpu
def test_kernels_from_a_local_folder(local_kernels, caplog):
    ops._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="tide_hf"):
        loaded = ops.load_kernels(use_kernels=True)
    assert f"fused kernels: {REPO}, build torch-cpu, on cpu" in caplog.text
    assert copy.deepcopy(loaded) is loaded
    assert loaded.run_on(torch.zeros(1), None)
    assert not loaded.run_on(torch.zeros(1, dtype=torch.float64))
    assert not loaded.run_on(torch.zeros(1), torch.zeros(1, device="meta"))
    facts = ops.kernel_facts(loaded, torch.device("cpu"), torch.bfloat16)
    assert (facts["variant"], facts["ops"]) == ("torch-cpu", dict.fromkeys(ops.OPS, "triton"))
    facts = ops.kernel_facts(loaded, torch.device("cpu"), torch.float64)
    assert (facts["variant"], facts["reason"]) == (None, "there are no kernels for torch.float64")


@pytest.mark.parametrize(
    ("device", "count", "reason"),
    [
        ("cuda", 1, "Tesla V100 has compute capability 7.0, and they need 7.5 or later"),
        ("cuda", 0, "PyTorch finds no cuda on this machine"),
        ("cuda:1", 1, "PyTorch finds no cuda:1 on this machine"),
    ],
)
def test_a_missing_or_old_gpu_is_refused_and_unpickling_on_it_gives_plain_pytorch(monkeypatch, device, count, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    assert reason in refusal(device=device)
    elsewhere = ops.Ops(None, "on another machine", (REPO, None, "auto", torch.device(device)))
    assert pickle.loads(pickle.dumps(elsewhere)).reason == reason


def test_nothing_is_fetched_by_name_alone(monkeypatch):
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setattr(fetch, "KERNELS_REVISION", None)
    assert "no kernels are published yet" in refusal()
    assert "revision 'main' is no commit" in refusal(repo="org/kernels", revision="main")


def test_the_package_kernels_has_to_be_recent(local_kernels, monkeypatch):
    monkeypatch.setattr(fetch, "version", {"kernels": "0.16.2"}.get)
    assert "the package kernels is 0.16.2, and 0.17 or later is needed" in refusal()
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert "pip install 'tide-hf[kernels]'" in refusal()


def add_file(name):
    return lambda variant: (variant / name).write_text("raise AssertionError('it ran')")


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda variant: (variant / "metadata.json").write_text('{"name": '), "metadata.json cannot be read"),
        (lambda variant: edit_metadata(variant, digest=None), "metadata.json cannot be read, or lists no files"),
        (lambda variant: edit_metadata(variant, digest=MD5), "lists files by 'md5', and not by sha256"),
        (add_file("routing.py"), "routing.py in "),
        (add_file("added.py"), "added.py in "),
    ],
    ids=["cut off", "no digest", "md5", "changed", "added"],
)
def test_a_build_that_was_tampered_with_does_not_run(monkeypatch, build, tmp_path, tamper, message):
    shutil.copytree(build, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={tmp_path / 'copy'}")
    tamper(tmp_path / "copy" / "build" / f"torch-{DEVICE}")
    assert message in refusal()


@on_cpu
def test_kernels_from_a_hub(model_hub, build, stage, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setattr("kernels.hf_hub.HfApi.get_organization_overview", lambda *_: None)
    folders = {name: tmp_path / name for name in ("good", "changed", "depends")}
    for folder in folders.values():
        shutil.copytree(build, folder, ignore=shutil.ignore_patterns("__pycache__"))
    add_file("norms.py")(folders["changed"] / "build" / "torch-cpu")
    dependency = {"kernel-depends": [{"repo-id": "other/kernel", "version": 1}]}
    edit_metadata(folders["depends"] / "build" / "torch-cpu", **dependency)
    folders["cuda"] = tmp_path / "cuda"
    stage.stage_noarch(folders["cuda"] / "build", "cuda")
    commits = {name: model_hub.add(f"org/{name}", folder, "kernels") for name, folder in folders.items()}
    loaded = ops.load_kernels("org/good", commits["good"], use_kernels=True)
    assert loaded.variant == "torch-cpu"
    assert loaded.kernels.__file__.startswith(str(tmp_path / "cache"))
    for name, message in {
        "changed": "norms.py in ",
        "depends": "'other/kernel' is not from a trusted publisher",
        "cuda": "torch-cuda: backend (cuda) does not match system backend (cpu)",
    }.items():
        assert message in refusal(repo=f"org/{name}", revision=commits[name])
    downloads = [path for path in model_hub.asked if "/resolve/" in path]
    assert all(commits[path.split("/")[2]] in path for path in downloads)


@pytest.mark.parametrize("family", ATTENTION)
def test_each_familys_norm_is_known(family):
    model = tiny_model(family)
    torch.nn.init.normal_(find_structure(model).norm.weight)
    for dtype in (torch.float32, torch.bfloat16):
        norm, states = find_structure(model.to(dtype)).norm, torch.randn(2, 3, 32).to(dtype)
        found = reference_ops.which_norm(norm, states)
        assert found is not None
        name, eps = found
        ours = reference_ops.normalize(states, norm.weight, getattr(norm, "bias", None), eps=eps, norm=name)
        torch.testing.assert_close(ours, norm(states), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
