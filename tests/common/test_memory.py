"""What this process may still take, and generation where that is little: the same tokens, from the plain weights."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import DraftUnembed, Unembed
from tide_hf.common import memory
from tide_hf.common.memory import RESERVED, copy_if_it_fits, free_host_memory
from tide_hf.weights import layouts as weight_layouts
from tide_hf.weights.layouts import PrepackedWeight

MB = 2**20
# Weights of 67 MB in float32. Copies of them pay, and all but the last argument's MB of memory are taken.
LIMITED = """
import resource, sys
import psutil, torch
from transformers import LlamaConfig, LlamaForCausalLM
from tide_hf import TIDEModelForCausalLM
from tide_hf.weights import layouts as weight_layouts
layouts = (weight_layouts.PrepackedWeight, None, *weight_layouts.WEIGHT_LAYOUTS[1:])
threads = torch.get_num_threads()
for rows in weight_layouts.PROBED_ROWS:
    weight_layouts._measured |= {(layout, torch.float32, threads, rows): i + 1 for i, layout in enumerate(layouts)}
torch.manual_seed(0)
sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
tokens = {"vocab_size": 300, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.2)).eval()
ids, options = torch.arange(3, 19)[None], {"max_new_tokens": 100, "do_sample": False}
expected = model.generate(ids, **options)
taken = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[2]) * 2**20, -1))
TIDEModelForCausalLM.attach(model, pack_weights="auto" if sys.argv[1] == "auto" else True, use_kernels=False)
assert torch.equal(model.generate(ids, **options), expected)
gates = model._tide.weights.gates()
print(sum(bool(gate.converted) for gate in gates), len(gates))
"""


@pytest.fixture(autouse=True)
def _nothing_is_logged_yet():
    memory._log_no_memory.cache_clear()
    yield
    memory._log_no_memory.cache_clear()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes a tree of cgroups, and returns what is free there; the machine itself has 1000 MB."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000 * MB}))

    def make(own, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(own)
        for name, content in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return free_host_memory(tmp_path) // MB

    return make


def group_v2(folder, most, used, cached=0):
    stat = f"anon 5\ninactive_file {cached * MB}\n"
    return {
        f"{folder}/memory.max": f"{most if most == 'max' else most * MB}\n",
        f"{folder}/memory.current": f"{used * MB}\n",
        f"{folder}/memory.stat": stat,
    }


def group_v1(folder, most, used, cached=0):
    return {
        f"memory/{folder}/memory.limit_in_bytes": f"{most * MB}\n",
        f"memory/{folder}/memory.usage_in_bytes": f"{used * MB}\n",
        f"memory/{folder}/memory.stat": f"inactive_file 0\ntotal_inactive_file {cached * MB}\n",
    }


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/\n", {}, 1000),
        ("0::/\n", group_v2(".", 500, 300), 200),  # a container that sees its own group as the root
        ("0::/a/b\n", {**group_v2("a/b", "max", 10), **group_v2("a", 600, 500, 50)}, 150),
        ("0::/a/b\n", {**group_v2("a/b", 90, 30), **group_v2("a", 600, 500)}, 60),
        ("0::/a\n", group_v2("a", 100, 200), 0),
        ("0::/a\n", group_v2("a", 2000, 200), 1000),
        ("5:cpu:/x\n4:hugetlb,memory:/a/b\n0::/\n", group_v1("a/b", 700, 300, 100), 500),
        ("4:memory:/docker/c\n", group_v1(".", 400, 300), 100),  # the mount is the container's group
        ("4:memory:/a\n", group_v1("a", 2**40, 300), 1000),
        ("0::/a\n", {**group_v2("a", 500, 300), "a/memory.stat": "anon 1"}, 1000),
    ],
)
def test_the_tightest_of_the_groups_limits_memory(machine, own, files, free):
    assert machine(own, files) == free


def test_limits_of_the_process_limit_memory_where_there_are_no_groups(machine, monkeypatch):
    limits = {psutil.RLIMIT_AS: psutil.RLIM_INFINITY, psutil.RLIMIT_DATA: psutil.RLIM_INFINITY}
    monkeypatch.setattr(psutil.Process, "rlimit", lambda _, limit: (limits[limit], -1))
    used = psutil.Process().memory_info()
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: used)
    assert free_host_memory(Path(os.devnull)) == 1000 * MB
    limits[psutil.RLIMIT_AS] = used.vms + 80 * MB
    assert free_host_memory(Path(os.devnull)) == 80 * MB
    limits[psutil.RLIMIT_DATA] = used.data + 7 * MB
    assert free_host_memory(Path(os.devnull)) == 7 * MB


def test_a_copy_is_made_only_where_memory_is_left_besides(monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_host_memory", lambda: 20 + RESERVED)
    assert copy_if_it_fits(lambda: "copy", 10) == "copy"
    assert copy_if_it_fits(lambda: "copy", 11) is None
    monkeypatch.setattr(memory, "free_host_memory", lambda: 0)
    assert copy_if_it_fits(lambda: "none", 0) == "none"
    assert caplog.text.count("no memory is left for copies of weights, so some are read as the model stores them") == 1
    assert "Raise the limit of the container or the process, or pass pack_weights=False" in caplog.text


@pytest.mark.parametrize("copy", [lambda: torch.empty(2**50), lambda: bytearray(2**60)])
def test_a_copy_whose_allocation_fails_is_not_made(copy, caplog):
    assert copy_if_it_fits(copy, 0) is None
    assert copy_if_it_fits(copy, 0) is None
    assert len(caplog.records) == 1


def test_other_errors_of_a_copy_are_raised():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        copy_if_it_fits(lambda: torch.ones(2, 3) @ torch.ones(2, 3), 0)


def test_a_layout_for_whose_measurement_no_memory_is_left_is_not_chosen(monkeypatch):
    monkeypatch.setattr(memory, "free_host_memory", lambda: 0)
    monkeypatch.setattr(weight_layouts, "_measured", {})
    weight_layouts._fastest_layout.cache_clear()
    assert weight_layouts.fastest_layout(torch.float32, 4, (PrepackedWeight,)) is None
    assert weight_layouts.clearly_faster_layout(torch.float32) is None
    weight_layouts._fastest_layout.cache_clear()


def test_drafts_are_of_all_tokens_where_rows_of_the_head_have_no_room(tiny_llama, monkeypatch):
    model = tiny_llama()
    unembed, state = Unembed(model, find_structure(model)), torch.randn(3, 32)
    monkeypatch.setattr(memory, "free_host_memory", lambda: 0)
    drafts = DraftUnembed(unembed, torch.arange(10))
    assert torch.equal(drafts(state), unembed(state).argmax(dim=-1))
    assert drafts.is_current()


@pytest.mark.skipif(not psutil.LINUX, reason="other systems do not hold a process to RLIMIT_AS")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize(
    ("pack_weights", "megabytes", "are_copied"),
    [("auto", 60, "none"), ("auto", 2000, "all"), ("True", 60, "none"), ("True", 300, "some")],
)
def test_generate_works_where_the_process_is_limited(pack_weights, megabytes, are_copied, tmp_path):
    command = [sys.executable, "-c", LIMITED, pack_weights, str(megabytes)]
    environment = os.environ | {"TIDE_HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    copied, gates = map(int, done.stdout.split())
    assert {0: "none", gates: "all"}.get(copied, "some") == are_copied
    assert ("no memory is left" in done.stderr) == (pack_weights == "True")
