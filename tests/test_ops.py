"""Which ops a model runs, where kernels come from, and that they change no decision.

Without a GPU kernels run under Triton's interpreter. What each of them computes is tested in hub_kernels/.
"""

import copy
import json
import logging
import pickle
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from families import ATTENTION, tiny_model
from loopback_hub import loopback_hub

from tide_hf import TIDEModelForCausalLM, TIDERouters, ops
from tide_hf.errors import ConfigurationError, KernelError
from tide_hf.structure import find_structure
from tide_hf.unembed import Unembed

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent
REPO = ops.KERNELS_REPO
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="about machines without a GPU")


@pytest.fixture(scope="session")
def stage():
    spec = spec_from_file_location("stage", ROOT / "hub_kernels" / "tide-kernels" / "stage.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build(stage, tmp_path_factory):
    """A folder with the kernels staged for this machine."""
    if DEVICE == "cpu" and torch.version.cuda is not None:
        pytest.skip("for a PyTorch with CUDA the client takes nothing but builds for CUDA, and there is no GPU")
    folder = tmp_path_factory.mktemp("kernels")
    stage.stage_noarch(folder / "build", DEVICE)
    return folder


@pytest.fixture
def local_kernels(monkeypatch, build):
    """The environment that takes the kernels from `build`."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={build}")


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


# Which ops a model runs


@on_cpu
def test_auto_on_a_cpu_says_once_that_it_is_plain_pytorch_and_why(caplog, monkeypatch, tiny_llama):
    monkeypatch.setattr(ops, "_logged", set())
    with caplog.at_level(logging.INFO, logger="tide_hf"):
        for _ in range(2):
            model = TIDEModelForCausalLM.attach(tiny_llama())
    (record,) = [record for record in caplog.records if record.name == "tide_hf.ops"]
    assert record.levelno == logging.INFO
    assert record.message == "plain PyTorch, no fused kernels: the model is on cpu, and they need an NVIDIA GPU"
    assert model._tide.unembed.ops.kernels is None
    assert set(model._tide.unembed.ops.implementations().values()) == {"torch"}


@on_cpu
def test_true_on_a_cpu_fails_with_the_reason(monkeypatch, tiny_model_folder):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError, match="the model is on cpu"):
        TIDEModelForCausalLM.from_pretrained(tiny_model_folder, use_kernels=True)


def test_false_asks_nobody(monkeypatch, tiny_model_folder):
    monkeypatch.setattr(ops, "obstacle", None)
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder, use_kernels=False)
    assert model._tide.unembed.ops is ops.PLAIN


def test_another_value_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigurationError, match="unknown use_kernels"):
        TIDEModelForCausalLM.from_pretrained("no/such/model", use_kernels="always")
    with pytest.raises(ConfigurationError, match="unknown use_kernels"):
        ops.load_kernels(use_kernels=None)


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    assert "Tesla V100 has compute capability 7.0, and they need 7.5 or later" in refusal(device="cuda")
    assert ops.load_kernels(device="cuda").reason.startswith("Tesla V100")


def test_a_build_for_other_gpus_is_refused(monkeypatch, tampered):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    edit_metadata(tampered, backend={"type": "cuda", "archs": ["9.0", "10.0"]})
    tampered.rename(tampered.with_name("torch-cuda"))
    assert "CUDA capability 8.0 of the current device is not supported" in refusal(device="cuda")


def test_importing_and_attaching_needs_no_network():
    code = "import socket; socket.socket.connect = None; import tide_hf.model; from tide_hf import ops; "
    code += "ops.load_kernels()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Where kernels come from


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
def test_the_facts_for_people(local_kernels):
    cpu, fused = torch.device("cpu"), ops.load_kernels(use_kernels=True)
    facts = ops.kernel_facts(fused, cpu, torch.bfloat16)
    assert facts == {
        "gpu": None,
        "dtype": "bfloat16",
        "variant": "torch-cpu",
        "reason": f"{REPO}, build torch-cpu",
        "ops": dict.fromkeys(ops.OPS, "triton"),
    }
    facts = ops.kernel_facts(fused, cpu, torch.float64)
    assert (facts["variant"], facts["reason"]) == (None, "there are no kernels for torch.float64")
    assert set(facts["ops"].values()) == {"torch"}
    facts = ops.kernel_facts(ops.load_kernels(), cpu, torch.float32)
    assert (facts["variant"], facts["ops"]["norm_route"]) == (None, "torch")
    assert "need an NVIDIA GPU" in facts["reason"]


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
from tide_hf import ops
from tide_hf.errors import KernelError
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


# That they change no decision


@pytest.fixture
def attached(local_kernels, tiny_llama):
    """A function that attaches to a small Llama with routers, with or without kernels."""

    def make(use_kernels, mode, **config):
        model = tiny_llama().to(DEVICE)
        settings = {"exit_layers": [1, 2], "exit_strategy": "linear", "router_bottleneck_dim": 8}
        record = {"exit_layers": {"1": {"agreement": 0.5}, "2": {"agreement": 0.6}}}
        routers = TIDERouters.for_model(model, **settings, calibration=record, **config)
        torch.manual_seed(1)
        for exit_layer in routers.exit_layers:
            torch.nn.init.normal_(routers[exit_layer].router.up.weight)
            torch.nn.init.normal_(routers[exit_layer].router.down.weight)
        return TIDEModelForCausalLM.attach(model, routers, mode=mode, use_kernels=use_kernels, exit_threshold=0.5)

    return make


@pytest.fixture
def calls(monkeypatch, local_kernels):
    """How often each kernel ran."""
    counted = {}
    original = ops.Ops.__getattr__

    def count(self, name):
        counted[name] = counted.get(name, 0) + 1
        return original(self, name)

    monkeypatch.setattr(ops.Ops, "__getattr__", count)
    return counted


@pytest.mark.parametrize("strategy", ["recompute", "propagate"])
def test_early_exit_decides_the_same(attached, calls, strategy):
    ids = torch.tensor([[5, 6, 7, 5, 6, 7], [9, 8, 7, 6, 5, 4]], device=DEVICE)
    results = []
    for use_kernels in (False, True):
        model = attached(use_kernels, "early_exit", kv_cache_strategy=strategy)
        tokens = model.generate(ids, max_new_tokens=12, do_sample=False)
        results.append((tokens.tolist(), model.last_exit_stats.per_token))
    assert results[0] == results[1]
    assert {layer for row in results[0][1] for layer in row} > {4}
    assert calls["norm_route"] > 10


def test_tokens_that_leave_in_the_prompt_are_the_same(attached, calls):
    ids = torch.arange(5, 45, device=DEVICE).view(2, 20)
    results = []
    for use_kernels in (False, True):
        model = attached(use_kernels, "early_exit", kv_cache_strategy="propagate")
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False, exits_in_prompt=True)
        results.append((tokens.tolist(), model.last_exit_stats.mlp_tokens_skipped))
    assert results[0] == results[1]
    assert results[0][1] > 0
    assert calls["exit_compact"] == calls["exit_scatter"] > 0


def test_drafts_and_answers_are_the_same(attached, calls, monkeypatch):
    monkeypatch.setattr("tide_hf.decoding.speculation.perf_counter", iter(range(10**6)).__next__)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 3, 9]], device=DEVICE)
    results = []
    for use_kernels in (False, True):
        model = attached(use_kernels, "self_speculative", compaction_threshold=0.0)
        tokens = model.generate(ids, max_new_tokens=24, do_sample=False)
        results.append((tokens.tolist(), model.last_exit_stats.drafted, model.last_exit_stats.accepted))
    assert results[0] == results[1]
    assert calls["kv_compact"] > 0


def test_a_shallow_step_drafts_the_same(attached, calls):
    states = torch.randn(3, 32, device=DEVICE)
    plain, fused = (attached(use_kernels, "self_speculative")._tide for use_kernels in (False, True))
    for exit_layer in (1, 2):
        heads = plain.exit_point(exit_layer).head, fused.exit_point(exit_layer).head
        assert torch.equal(plain.draft_unembed()(heads[0](states)), fused.draft_unembed()(heads[1](states)))
        routers = plain.exit_point(exit_layer).router, fused.exit_point(exit_layer).router
        torch.testing.assert_close(fused.unembed.route(routers[1], states), plain.unembed.route(routers[0], states))
    assert calls == {"draft_top1": 2, "norm_route": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ATTENTION)
def test_each_familys_norm_is_known(family, dtype):
    model = tiny_model(family).to(dtype)
    norm, states = find_structure(model).norm, torch.randn(2, 3, 32).to(dtype)
    torch.nn.init.normal_(norm.weight)
    found = ops.which_norm(norm, states)
    assert found is not None
    name, eps = found
    ours = ops.normalize(states, norm.weight, getattr(norm, "bias", None), eps=eps, norm=name)
    torch.testing.assert_close(ours, norm(states), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_norm_that_is_none_of_these_is_left_alone(local_kernels, calls, tiny_llama):
    class Cubic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(32)), 1e-5

        def forward(self, x):
            return x**3

    model = tiny_llama()
    model.model.norm = Cubic()
    model.to(DEVICE)
    unembed = Unembed(model, find_structure(model), ops.load_kernels(use_kernels=True))
    router, states = (
        TIDERouters.for_model(model, exit_layers=[1])[1].router.to(DEVICE),
        torch.randn(2, 32, device=DEVICE),
    )
    assert torch.equal(unembed.route(router, states), router(states**3))
    assert calls == {}


def test_copies_keep_their_ops_and_pickles_ask_anew(attached):
    model = attached(True, "early_exit")
    assert copy.deepcopy(model)._tide.unembed.ops is model._tide.unembed.ops
    again = pickle.loads(pickle.dumps(model._tide.unembed.ops))
    assert (again.kernels is None) == (DEVICE == "cpu")
    assert pickle.loads(pickle.dumps(ops.PLAIN)) is ops.PLAIN
