"""C++ kernels: fetched ready-made or built once, and kept where nobody else can write."""

import base64
import hashlib
import importlib.util
import json
import logging
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest
import torch
from filelock import FileLock
from torch._inductor import codecache, config

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import KernelError
from tide_hf.common.files import ABANDONED_AFTER
from tide_hf.engines import warm_up
from tide_hf.kernels import compile_cache, ops
from tide_hf.kernels.cpu import cpp_kernels as kernels
from tide_hf.kernels.cpu.cpp_kernels import are_ready, build_kernels, load_op, obstacle_to_build
from tide_hf.kernels.fetch import KERNELS_REPO

BUILT, BUILT_FOLDER = kernels._built, kernels.built_folder  # before conftest.py replaces them
STAGE_CPU = kernels.stage_module().stage_cpu
DTYPE = torch.float32
# Loading a truncated library would end the process, so this runs in another one.
LATER_PROCESS = """
import torch
from torch._inductor import codecache
from tide_hf.kernels.cpu import cpp_kernels as kernels
from tide_hf.weights import layouts as weight_layouts
kernels._built = None
print(kernels.are_ready(torch.float32), kernels.are_ready(torch.bfloat16))
if kernels.are_ready(torch.float32):
    state, weight = torch.randn(3, 40), torch.randn(7, 40)
    print(torch.allclose(weight_layouts.PlainWeight(weight).apply(state, None), state @ weight.T, atol=1e-4))
"""
# A fresh process in which the first call reads weights as the model stores them, which only kernels do.
FIRST_CALL = """
import sys, torch
from tide_hf import TIDEModelForCausalLM
from tide_hf.weights import layouts as weight_layouts
weight_layouts._measured.update({
    (layout, torch.float32, torch.get_num_threads(), rows): seconds
    for rows in weight_layouts.PROBED_ROWS
    for layout, seconds in zip((weight_layouts.PlainWeight, None, *weight_layouts.WEIGHT_LAYOUTS[:2]), range(1, 5))
})
model = TIDEModelForCausalLM.from_pretrained(sys.argv[1])
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
print({layout.__name__ for gate in model._tide.weights.gates() for layout in gate.converted})
"""

# What Inductor asks the compiler about this CPU's vectors, in a process that loads kernels first.
PROBES = """
import sys, torch
from torch._inductor import cpu_vec_isa
from tide_hf.kernels.cpu import cpp_kernels as kernels
if len(sys.argv) > 1:
    kernels.built_folder = lambda _: kernels.Path(sys.argv[1])
codes = []
cpu_vec_isa.VecISA.check_build = lambda _, code: codes.append(code) or True
print(kernels.are_ready(torch.float32))
kernels.spare_probes()
cpu_vec_isa.pick_vec_isa()
print(cpu_vec_isa.VecISA._avx_code in codes)
"""

pytestmark = pytest.mark.usefixtures("fresh_kernels")


def forget_staged():
    """Let builds be loaded as in a new process."""
    for name in [name for name in sys.modules if name.startswith("staged_")]:
        del sys.modules[name]


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty cache of kernels, of which the process has loaded none."""
    forget_staged()
    monkeypatch.setattr(kernels, "built_folder", BUILT_FOLDER)
    monkeypatch.setattr(kernels, "_built", BUILT)
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "home"))
    compile_cache.warn_unused.cache_clear()
    kernels._warn_refused.cache_clear()
    return tmp_path / "home"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function that makes a shell script, which is the compiler unless `CXX` is set otherwise."""

    def make(content, name="compiler"):
        path = tmp_path / name
        path.write_bytes(b"#!/bin/sh\n" + content)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


@pytest.fixture
def copied(monkeypatch, shared_kernels):
    """Builds are copies of one that was built before."""
    shared_kernels(DTYPE)

    def stage_cpu(folder, levels, values):
        (dtype,) = (dtype for dtype, value in kernels.CPU_DTYPES.items() if [value] == values)
        variant = shared_kernels(dtype)
        return shutil.copytree(variant, folder / variant.name, ignore=shutil.ignore_patterns("__pycache__"))

    monkeypatch.setattr(kernels.stage_module(), "stage_cpu", stage_cpu)


@pytest.fixture
def kept(home, copied, monkeypatch):
    """A build that an earlier process has kept, under a umask that lets others write."""
    umask = os.umask(0)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    try:
        assert build_kernels(DTYPE)
    finally:
        os.umask(umask)
    kernels._loaded.clear()
    forget_staged()
    (variant,) = BUILT_FOLDER(DTYPE).iterdir()
    return variant


@pytest.mark.parametrize(
    ("compiler", "reason"), [("false", "false failed"), ("no-compiler", "no-compiler was not found")]
)
def test_a_build_that_fails_is_logged_once(home, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    for _ in range(2):
        assert load_op("skinny_gemm", DTYPE) is None
        assert not build_kernels(DTYPE)
    (record,) = caplog.records
    message = f"no C++ kernels for torch.float32, so PyTorch's own operations are used: {reason}"
    assert record.getMessage().startswith(message)
    assert not list(home.glob("kernels/*/*"))  # nothing half finished is left


def test_other_systems_and_dtypes_have_no_kernels(home, monkeypatch, caplog):
    assert load_op("skinny_gemm", torch.float64) is None
    assert not are_ready(torch.float64)
    assert not build_kernels(torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr("platform.system", lambda: "Windows")
        assert not build_kernels(DTYPE)
    assert "there are no CPU kernels for Windows on" in caplog.text
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert not build_kernels(torch.bfloat16)
    assert "PyTorch is 2.9.1+cpu, and the kernels need 2.10 or later" in caplog.text


def test_an_obstacle_to_a_build_is_known_before_it_starts(home, monkeypatch):
    assert obstacle_to_build(DTYPE) is None
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-compiler")
        assert obstacle_to_build(DTYPE) == "no-compiler was not found"
    with monkeypatch.context() as patch:
        patch.setattr("platform.system", lambda: "Windows")
        assert obstacle_to_build(DTYPE).startswith("there are no CPU kernels for Windows on")
    folder = BUILT_FOLDER(DTYPE)
    folder.chmod(0o757)
    assert obstacle_to_build(DTYPE) == f"builds cannot be kept in {folder}"


def test_without_the_sources_there_are_no_kernels(home, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(kernels, "PROJECT", tmp_path)  # such as a checkout without links
    kernels.stage_module.cache_clear()
    try:
        assert not are_ready(DTYPE)
        assert "stage.py" in obstacle_to_build(DTYPE)
        assert not build_kernels(DTYPE)
    finally:
        kernels.stage_module.cache_clear()
    assert "no C++ kernels for torch.float32" in caplog.text


def test_what_a_compiler_says_is_shown(home, script, caplog):
    script(b"echo note >&2\nprintf 'an \\377 error\\n' >&2\nexit 1\n")
    assert not build_kernels(DTYPE)
    assert "compiler failed: an \ufffd error" in caplog.text


NO_LIBRARY, DAMAGED_LIBRARY = b"exit 0\n", b'while [ "$1" != -o ]; do shift; done; echo damaged > "$2"\n'


@pytest.mark.parametrize("wrong", [NO_LIBRARY, DAMAGED_LIBRARY], ids=["no library", "a damaged one"])
def test_a_build_that_cannot_be_loaded_is_not_kept_and_the_next_process_builds_again(
    home, copied, script, monkeypatch, caplog, wrong
):
    with monkeypatch.context() as patch:
        script(wrong)
        patch.setattr(kernels.stage_module(), "stage_cpu", STAGE_CPU)
        patch.setitem(STAGE_CPU.__globals__, "_unique_name", lambda *_: "not_loaded_yet")  # as in a new process
        assert not build_kernels(DTYPE)
        assert not list(home.glob("kernels/*/*"))
    assert "no C++ kernels for torch.float32, so PyTorch's own operations are used" in caplog.text
    kernels._loaded.clear()
    monkeypatch.delenv("CXX")
    assert build_kernels(DTYPE)


def test_a_kept_build_that_cannot_be_loaded_any_more_is_built_again(kept):
    content = b"raise ImportError"
    (kept / "cpu.py").write_bytes(content)
    metadata = json.loads((kept / "metadata.json").read_text())
    metadata["digest"]["files"]["cpu.py"] = base64.b64encode(hashlib.sha256(content).digest()).decode()
    (kept / "metadata.json").write_text(json.dumps(metadata))
    assert not are_ready(DTYPE)
    assert not kept.exists()
    assert build_kernels(DTYPE)
    assert kept.exists()


@pytest.mark.parametrize("command", ["{ccache} c++", "'{spaces}' c++", "{spaces}"])
def test_a_compiler_may_be_a_command_with_arguments_or_have_spaces_in_its_name(home, script, monkeypatch, command):
    ccache, spaces = script(b'exec "$@"', "ccache"), script(b'[ "$1" = c++ ] && shift; exec c++ "$@"', "my compiler")
    monkeypatch.setenv("CXX", command.format(ccache=ccache, spaces=spaces))
    assert obstacle_to_build(DTYPE) is None
    stage = kernels.stage_module()
    whole = [*stage.compiler(), "--version"]
    assert subprocess.run(whole, capture_output=True, text=True, check=True).stdout == stage.compiler_facts()[-1]
    assert stage.compiler_facts()[-1].strip()


def test_a_compiler_with_an_open_quote_is_refused(home, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "'c++")
    assert not build_kernels(DTYPE)
    assert "CXX is no command (No closing quotation)" in caplog.text


def test_what_a_killed_build_left_is_removed(home, copied):
    folder = BUILT_FOLDER(DTYPE)
    names = {"own": folder / ".a", "other": folder.parent / "other" / ".b", "old": folder.parent / "other" / ".c"}
    for name in names.values():
        (name / "torch-cpu").mkdir(parents=True, mode=0o755)
    before = os.stat(folder).st_mtime - ABANDONED_AFTER - 1
    os.utime(names["old"], (before, before))
    assert build_kernels(DTYPE)
    assert {name for name, path in names.items() if path.exists()} == {"other"}  # which another process may build


def test_a_compiler_writes_to_the_folder_that_is_removed_after_a_killed_build(home, script, tmp_path):
    script(b'echo "$@" >> "$0.log"; exit 1')
    assert not build_kernels(DTYPE)
    written = [line.split()[-1] for line in (tmp_path / "compiler.log").read_text().splitlines() if " -c " in line]
    assert written
    assert all(Path(file).relative_to(BUILT_FOLDER(DTYPE)).parts[0].startswith(".") for file in written)


@pytest.fixture
def impatient(monkeypatch):
    """Neither another process nor a compiler is waited for."""
    monkeypatch.setattr(kernels.stage_module(), "BUILD_SECONDS", 0.1)
    monkeypatch.setattr(kernels.stage_module(), "VERSION_SECONDS", 0.1)


@pytest.mark.timeout(120)
def test_a_compiler_that_does_not_end_is_stopped(home, script, impatient, caplog):
    script(b"exec sleep 600")
    assert not build_kernels(DTYPE)
    assert "compiler takes too long, and was stopped. CXX may name another compiler." in caplog.text


@pytest.mark.timeout(120)
def test_a_build_of_another_process_that_does_not_end_is_not_waited_for(
    home, impatient, tiny_llama, monkeypatch, caplog
):
    monkeypatch.setattr(warm_up, "WORTH_A_BUILD", 0)
    model, ids, options = tiny_llama(), torch.tensor([[1, 2, 3]]), {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    folder = BUILT_FOLDER(DTYPE)
    folder.parent.mkdir(parents=True)
    with FileLock(f"{folder}.lock"):
        TIDEModelForCausalLM.attach(model)
        assert torch.equal(model.generate(ids, **options), expected)
    (message,) = [record.getMessage() for record in caplog.records if "no C++ kernels" in record.getMessage()]
    assert f"another process builds them and does not end: got a lock on {folder}.lock for 0 s." in message
    assert message.endswith("within that time. End that process, or set TIDE_HF_HOME to another folder.")


def plant_bytecode(source, folder):
    """Put bytecode that Python takes for that of `source` where Python looks for it."""
    other, found = folder / "other.py", source.stat()
    other.write_text("raise AssertionError('it ran')\n".ljust(found.st_size, "#"))
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    cached = importlib.util.cache_from_source(source)
    py_compile.compile(other, cfile=cached, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)


@pytest.mark.usefixtures("not_fetched_before")
def test_bytecode_in_a_local_build_is_neither_run_nor_written(shared_kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    variant = shared_kernels(DTYPE)
    copy = shutil.copytree(variant, tmp_path / "build" / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
    plant_bytecode(copy / "cpu.py", tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", f"{KERNELS_REPO}={tmp_path}")
    assert kernels.fetch_kernels(KERNELS_REPO, None) is None
    assert are_ready(DTYPE)
    assert len(list((copy / "__pycache__").iterdir())) == 1
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (None, False)


def later_process(script, *arguments, **environment):
    command = [sys.executable, "-c", script, *arguments]
    environment = os.environ | environment | {"PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_what_was_built_here_need_not_be_asked_of_the_compiler_again(kept, tmp_path, monkeypatch):
    assert later_process(PROBES).stdout.split() == ["True", "False"]
    elsewhere = tmp_path / "ready-made"
    shutil.move(kept.parent, elsewhere)  # as if another compiler had built it
    assert later_process(PROBES, str(elsewhere)).stdout.split() == ["True", "True"]


def test_a_later_process_builds_nothing_and_loads_nothing_truncated(kept):
    for _ in range(2):
        assert later_process(LATER_PROCESS).stdout.split() == ["True", "False", "True"]
    (library,) = kept.glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # the file of a loaded library must not change
    library.write_bytes(whole[:5000])
    assert later_process(LATER_PROCESS).stdout.split() == ["False", "False"]
    assert not kept.exists()


def refuse(*_args, **_kwargs):
    raise PermissionError(13, "Permission denied")


def test_a_changed_build_is_built_again(kept, caplog, monkeypatch):
    (kept / "cpu.py").write_text("raise AssertionError('it ran')")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)  # the folder is another user's
        patch.setattr(os, "unlink", refuse)
        assert not are_ready(DTYPE)
    with caplog.at_level(logging.INFO, logger="tide_hf.kernels"):
        assert not are_ready(DTYPE)
    assert (
        f"{kept} cannot be loaded and is built again: cpu.py in {kept} is not what metadata.json lists" in caplog.text
    )
    assert build_kernels(DTYPE)
    assert kept.exists()


@pytest.mark.parametrize("what", ["linked file", "linked build", "linked folder", "folder", "build", "file", "owner"])
def test_a_build_that_others_may_have_written_is_not_loaded(what, kept, monkeypatch, caplog, tmp_path):
    folder, metadata = kept.parent, kept / "metadata.json"
    match what:
        case "linked file" | "linked build" | "linked folder":
            linked = {"linked file": metadata, "linked build": kept, "linked folder": folder}[what]
            linked.rename(tmp_path / "elsewhere")
            linked.symlink_to(tmp_path / "elsewhere")
        case "folder":
            folder.chmod(0o757)
        case "build":
            kept.chmod(0o757)
        case "file":
            metadata.chmod(0o666)
        case "owner":
            if os.geteuid() == 0:
                os.chown(metadata, 12345, -1)
            else:
                monkeypatch.setattr(os, "geteuid", lambda: 12345)
    (kept / "cpu.py").write_text("raise AssertionError('it ran')")
    assert not are_ready(DTYPE)
    # So that no process builds while it attaches.
    assert obstacle_to_build(DTYPE) == f"builds cannot be kept in {folder}"
    assert build_kernels(DTYPE)
    assert not Path(kernels._loaded[DTYPE].__file__).is_relative_to(kept)
    refusal = f"{kept} is not loaded, since others may have written to it, or it is a link. Remove it, and the kernels"
    if "folder" in what:
        refusal = f"{folder.parent} is not used for compiled code: others may write to it, or it is a link"
    assert caplog.text.count(refusal) == 1


def test_kernels_are_built_where_they_cannot_be_kept(home, copied, caplog):
    home.touch()
    with caplog.at_level(logging.INFO, logger="tide_hf.kernels"):
        assert build_kernels(DTYPE)
    assert "C++ kernels are not kept for later processes" in caplog.text


def test_a_process_that_waited_for_another_ones_build_takes_it(kept, monkeypatch):
    monkeypatch.setattr(kernels.stage_module(), "stage_cpu", pytest.fail)
    assert kernels._built(DTYPE) == kept


def test_of_two_processes_that_build_the_first_ones_build_is_kept(home, copied, monkeypatch):
    rename = os.rename

    def late(source, target):
        shutil.copytree(source, target)
        (Path(target) / "cpu.py").touch()
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert build_kernels(DTYPE)
    assert len(list(BUILT_FOLDER(DTYPE).iterdir())) == 1


@pytest.mark.parametrize("change", ["cpu", "version", "source", "dtype", "compiler", "its path", "its version"])
def test_a_build_is_for_one_kind_of_cpu_one_pytorch_and_one_compiler(change, home, script, monkeypatch, tmp_path):
    def folder(dtype=DTYPE):
        for function in (kernels._key, kernels._compiler_key, kernels.stage_module()._version):
            function.cache_clear()
        return BUILT_FOLDER(dtype)

    compiler = script(b"echo 1")
    before, dtype, stage = folder(), torch.bfloat16 if change == "dtype" else DTYPE, kernels.stage_module()
    with pytest.MonkeyPatch.context() as patch:
        match change:
            case "cpu":
                patch.setattr(stage, "cpu_level", lambda: "other")
            case "version":
                patch.setattr(torch, "__version__", "2.0")
            case "source":
                (tmp_path / "other.cpp").touch()
                patch.setattr(stage, "cpu_files", lambda: [tmp_path / "other.cpp"])
            case "compiler":
                patch.setenv("CXX", f"{compiler} -w")
            case "its path":
                patch.setenv("CXX", str(shutil.copy(compiler, tmp_path / "moved")))
            case "its version":
                script(b"echo 2")
        assert folder(dtype) != before
    script(b"echo 1")
    assert folder() == before


def test_without_a_compiler_a_build_of_any_is_loaded(kept, monkeypatch):
    monkeypatch.setenv("CXX", "no-compiler")
    assert are_ready(DTYPE)


@pytest.fixture
def published(model_hub, shared_kernels, tmp_path, monkeypatch):
    """Publish a build, changed by a function, and return its commit."""
    monkeypatch.setattr("kernels.hf_hub.HfApi.get_organization_overview", lambda *_: None)

    def publish(name, change=lambda variant: None):
        variant = shared_kernels(DTYPE)
        copy = shutil.copytree(
            variant, tmp_path / name / "build" / variant.name, ignore=shutil.ignore_patterns("__pycache__")
        )
        change(copy)
        return model_hub.add(f"org/{name}", tmp_path / name, "kernels")

    return publish


@pytest.fixture
def not_fetched_before(monkeypatch):
    """This process has not tried to fetch kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which would ask for Triton's
    kernels._fetched.cache_clear()
    yield
    kernels._fetched.cache_clear()


@pytest.mark.usefixtures("not_fetched_before")
def test_kernels_from_a_hub_serve_all_dtypes_and_are_not_built(published, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "_built", pytest.fail)
    commit = published("good")
    loaded = ops.load_kernels("org/good", commit, use_kernels=True, device="cpu")
    assert (loaded.kernels, loaded.reason) == (None, "")
    facts = ops.kernel_facts(loaded, torch.device("cpu"), DTYPE)
    variant = Path(kernels._loaded[DTYPE].__file__).parent
    assert variant.is_relative_to(tmp_path / "cache")
    names = {*kernels.stage_module().CPU_SOURCES, "are_samples"}
    assert (facts["variant"], facts["ops"]) == (variant.name, dict.fromkeys(names, "cpu"))
    assert all(map(are_ready, kernels.CPU_DTYPES))


@pytest.mark.usefixtures("not_fetched_before")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda variant: (variant / "cpu.py").write_text("raise AssertionError('it ran')"), "cpu.py in "),
        (lambda variant: variant.rename(variant.with_name("torch-stable-abi210-cpu-riscv64-linux")), "riscv64"),
        (lambda variant: variant.rename(variant.with_name("torch-cuda")), "backend (cuda) does not match"),
    ],
    ids=["tampered with", "another architecture", "no build for CPUs"],
)
def test_a_build_that_does_not_fit_is_refused_and_the_plain_path_runs(
    published, monkeypatch, tiny_llama, change, reason
):
    commit = published("other", change)
    found = kernels.fetch_kernels("org/other", commit)
    assert reason in found
    assert not are_ready(DTYPE)
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(kernels, "_built", BUILT)
    with pytest.raises(KernelError, match="and they cannot be built"):
        ops.load_kernels("org/other", commit, use_kernels=True, device="cpu")
    model = TIDEModelForCausalLM.attach(tiny_llama())
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


@pytest.mark.usefixtures("not_fetched_before")
def test_use_kernels_builds_what_cannot_be_fetched(home, copied, tiny_llama, monkeypatch):
    TIDEModelForCausalLM.attach(tiny_llama(), use_kernels=False)
    assert not are_ready(DTYPE)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = TIDEModelForCausalLM.attach(tiny_llama(), use_kernels=True)
    assert model._tide.unembed.ops.reason.startswith("no kernels are published yet")
    assert are_ready(DTYPE)
    assert not are_ready(torch.bfloat16)


def test_the_first_call_of_a_fresh_process_uses_a_ready_made_build(shared_kernels, tiny_model_folder, tmp_path):
    folder = tmp_path / "build"
    folder.symlink_to(shared_kernels(DTYPE).parent)
    found = later_process(
        FIRST_CALL, str(tiny_model_folder), LOCAL_KERNELS=f"{KERNELS_REPO}={tmp_path}", TIDE_HF_HOME=str(tmp_path)
    )
    assert found.stdout.strip() == "{'PlainWeight'}", found.stderr


def test_inductors_header_is_precompiled_while_the_first_graph_is_traced(home, monkeypatch):
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    begun, traced = Event(), Event()
    calls = []

    def load(*_args):
        calls.append(compile_cache.compile_cache_folder())
        begun.set()
        assert traced.wait(60)
        raise RuntimeError("no compiler")  # which is reported elsewhere

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding_async", load)
    for _ in range(2):  # again, since there is no header yet
        begun.clear(), traced.clear()
        with compile_cache.compiling(), kernels.precompiling_header():
            assert begun.wait(60)
            traced.set()
    with config.patch(cpp_cache_precompile_headers=False), kernels.precompiling_header():
        pass
    headers = home / "inductor" / compile_cache.HEADER_FOLDER
    headers.mkdir()
    (headers / "some.h.gch").touch()
    with compile_cache.compiling(), kernels.precompiling_header():
        pass
    assert calls == [home / "inductor"] * 2
