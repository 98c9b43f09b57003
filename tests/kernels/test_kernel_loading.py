"""Where kernels come from: a local folder or a Hub, and what is refused before any of it runs."""

import json
import logging
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from loopback_hub import loopback_hub
from repository import ROOT

from tide_hf.common.errors import KernelError
from tide_hf.kernels import loader as kernel_loading
from tide_hf.kernels import ops

pytest.importorskip("triton")
REPO = ops.KERNELS_REPO
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="about machines without a GPU")


@pytest.fixture
def tampered(monkeypatch, build, tmp_path):
    """A copy of `build` to tamper with; gives its variant's folder."""
    folder = tmp_path / "tampered"
    shutil.copytree(build, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={folder}")
    return folder / "build" / f"torch-{DEVICE}"


def edit_metadata(variant, **changes):
    path = variant / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(**arguments):
    with pytest.raises(KernelError) as caught:
        ops.load_kernels(use_kernels=True, **arguments)
    assert "Expected an NVIDIA GPU" in str(caught.value)
    return str(caught.value)


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    assert "Tesla V100 has compute capability 7.0, and they need 7.5 or later" in refusal(device="cuda")
    assert ops.load_kernels(device="cuda").reason.startswith("Tesla V100")


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(device != "cuda"))
    assert f"PyTorch finds no {device} on this machine" in refusal(device=device)


def test_what_a_gpu_ran_is_unpickled_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    there = ops.Ops(None, "as there", (REPO, None, torch.device("cuda", 0)))
    assert pickle.loads(pickle.dumps(there)).reason == "PyTorch finds no cuda:0 on this machine"


def test_a_build_for_other_gpus_is_refused(monkeypatch, tampered):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    edit_metadata(tampered, backend={"type": "cuda", "archs": ["9.0", "10.0"]})
    tampered.rename(tampered.with_name("torch-cuda"))
    assert "CUDA capability 8.0 of the current device is not supported" in refusal(device="cuda")


@on_cpu
def test_kernels_from_a_local_folder(local_kernels, caplog, monkeypatch):
    monkeypatch.setattr(ops, "_logged", set())
    with caplog.at_level(logging.INFO, logger="tide_hf"):
        loaded = ops.load_kernels(use_kernels=True)
    assert f"fused kernels: {REPO}, build torch-cpu, on cpu" in caplog.text
    assert loaded.kernels.variant == "torch-cpu"
    assert loaded.implementations() == dict.fromkeys(ops.OPS, "triton")
    assert loaded.run_on(torch.zeros(1), None)
    assert not loaded.run_on(torch.zeros(1, dtype=torch.float64))
    assert not loaded.run_on(torch.zeros(1), torch.zeros(1, device="meta"))
    with pytest.raises(AttributeError, match="no attribute 'other_op'"):
        _ = loaded.other_op


@on_cpu
def test_auto_never_takes_the_interpreter(local_kernels):
    assert ops.load_kernels().kernels is None


def test_nothing_is_fetched_by_name_alone(monkeypatch):
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setattr(ops, "KERNELS_REVISION", None)
    assert "no kernels are published yet" in refusal()
    assert "revision 'main' is no commit" in refusal(repo="org/kernels", revision="main")


def test_without_the_package_it_says_how_to_get_it(local_kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert "pip install 'tide-hf[kernels]'" in refusal()


def test_a_package_that_is_too_old_is_named(local_kernels, monkeypatch):
    monkeypatch.setattr(kernel_loading, "version", {"kernels": "0.16.2"}.get)
    assert "the package kernels is 0.16.2, and 0.17 or later is needed" in refusal()


@on_cpu
def test_a_missing_variant_is_named(tampered):
    edit_metadata(tampered, backend={"type": "cuda"})
    tampered.rename(tampered.with_name("torch-cuda"))
    assert "torch-cuda: backend (cuda) does not match system backend (cpu)" in refusal()


def test_metadata_that_is_cut_off(tampered):
    path = tampered / "metadata.json"
    path.write_text(path.read_text()[:40])
    assert "metadata.json cannot be read" in refusal()


def test_metadata_that_lists_other_files(tampered):
    digest = json.loads((tampered / "metadata.json").read_text())["digest"]
    digest["files"]["routing.py"] = digest["files"]["norms.py"]
    edit_metadata(tampered, digest=digest)
    assert "routing.py in " in refusal()


@pytest.mark.parametrize("algorithm", ["shake_128", "md5", 256])
def test_metadata_that_lists_files_otherwise(tampered, algorithm):
    digest = json.loads((tampered / "metadata.json").read_text())["digest"]
    edit_metadata(tampered, digest=digest | {"algorithm": algorithm})
    assert f"lists files by {algorithm!r}, and not by sha256" in refusal()


@pytest.mark.parametrize("name", ["routing.py", "added.py"])
def test_changed_files_do_not_run(tampered, name):
    (tampered / name).write_text("raise AssertionError('it ran')")
    assert f"{name} in {tampered} is not what metadata.json lists" in refusal()


def test_a_dependency_that_is_not_trusted(tampered, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("kernels.hf_hub.HfApi.get_organization_overview", lambda *args: None)
    edit_metadata(tampered, **{"kernel-depends": [{"repo-id": "other/kernel", "version": 1}]})
    assert "'other/kernel' is not from a trusted publisher" in refusal()


FROM_HUB = """
import json, sys
from tide_hf.kernels import ops
from tide_hf.common.errors import KernelError
results = {}
for repo, commit in json.loads(sys.argv[1]).items():
    try:
        loaded = ops.load_kernels(repo, commit, use_kernels=True)
        results[repo] = [loaded.kernels.variant, str(loaded.kernels.module.__file__)]
    except KernelError as error:
        results[repo] = str(error)
print(json.dumps(results))
"""


@on_cpu
def test_kernels_from_a_hub(build, stage, tmp_path):
    hub = tmp_path / "hub"
    shutil.copytree(build, hub / "org" / "good", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(hub / "org" / "good", hub / "org" / "changed")
    (hub / "org" / "changed" / "build" / "torch-cpu" / "norms.py").write_text("raise AssertionError('it ran')")
    shutil.copytree(hub / "org" / "good", hub / "org" / "depends")
    dependency = {"kernel-depends": [{"repo-id": "other/kernel", "version": 1}]}
    edit_metadata(hub / "org" / "depends" / "build" / "torch-cpu", **dependency)
    stage.stage_noarch(hub / "org" / "cuda" / "build", "cuda")
    with loopback_hub() as server:
        repos = {
            f"org/{folder.name}": server.add(f"org/{folder.name}", folder, "kernels") for folder in hub.glob("*/*")
        }
        environment = {
            "PATH": "",
            "HF_ENDPOINT": server.address,
            "HF_HOME": str(tmp_path / "home"),
            "TRITON_INTERPRET": "1",
        }
        environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_USER_AGENT_ORIGIN": "tide_hf", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", FROM_HUB, json.dumps(repos)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    variant, file = results["org/good"]
    assert variant == "torch-cpu"
    assert file.startswith(str(tmp_path / "home"))
    assert "norms.py in " in results["org/changed"]
    assert "'other/kernel'" in results["org/depends"]
    assert "trust" in results["org/depends"]
    assert "torch-cuda: backend (cuda) does not match system backend (cpu)" in results["org/cuda"]
    assert all(repos["/".join(path.split("/")[1:3])] in path for path in server.asked if "/resolve/" in path)
