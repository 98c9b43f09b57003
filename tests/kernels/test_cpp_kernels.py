"""C++ kernels: compiled in parallel, and cached where nobody else can write."""

import ctypes
import hashlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppCodeCache

from tide_hf.kernels import compile_cache
from tide_hf.kernels.cpu import cpp_kernels as kernels
from tide_hf.kernels.cpu.cpp_kernels import KERNELS, OPS, compile_kernel, is_loaded

WAIT_SECONDS = 30
CACHED_PATH = kernels.cached_path  # before conftest.py hides the cache
GEMM = "skinny_gemm", torch.float32
LIBRARY = SimpleNamespace(_name="/nowhere/library.so", run=ctypes.CFUNCTYPE(None)(), register_kernel=lambda *_: None)
# Loading a truncated library would end the process, so this runs in another one. The ops are loaded once a process.
LATER_PROCESS = """
import torch
from tide_hf.kernels.cpu import cpp_kernels as kernels, weight_layouts
gemm = "skinny_gemm", torch.float32
def truncate(path):
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:5000])
    return whole
ops, path = kernels.cached_path(kernels.OPS), kernels.cached_path(*gemm)
whole = truncate(ops)
print(kernels.is_loaded(*gemm))
ops.write_bytes(whole)
whole = truncate(path)
print(kernels.is_loaded(*gemm), kernels.compile_kernel(*gemm, ()), path.read_bytes() == whole)
kernels._loaded.clear()
kernels._compile = None
print(kernels.is_loaded("prefill_attention", torch.float32), kernels.is_loaded(*gemm))
state, weight = torch.randn(3, 40), torch.randn(7, 40)
print(torch.allclose(weight_layouts.PlainWeight(weight).apply(state, None), state @ weight.T, atol=1e-4))
"""

pytestmark = pytest.mark.usefixtures("fresh_kernels")


@pytest.fixture
def compiler(monkeypatch):
    """A function that sets what stands in for Inductor's loading of a compiled source."""
    monkeypatch.setattr(kernels, "_ops", None)
    monkeypatch.setattr(CppCodeCache, "load_async", lambda *_args, **_kwargs: None)
    return lambda load: monkeypatch.setattr(CppCodeCache, "load", load)


def test_each_file_is_a_kernel():
    assert {path.stem for path in Path(kernels.__file__).parent.glob("*.cpp")} == {*KERNELS, OPS}


def test_all_kernels_are_compiled_in_parallel_with_the_first(monkeypatch, compiler):
    together, loaded, futures = threading.Barrier(len(KERNELS) + 1, timeout=WAIT_SECONDS), [], []
    monkeypatch.setattr(
        CppCodeCache, "load_async", lambda _text, device_type, submit_fn: futures.append(submit_fn(together.wait))
    )
    compiler(lambda text, device_type: loaded.append(text) or LIBRARY)
    assert compile_kernel("groupwise_gemm", torch.bfloat16)
    assert loaded == [kernels._source_of(OPS), kernels._source_of("groupwise_gemm", torch.bfloat16)]
    assert sorted(future.result() for future in futures) == list(range(len(KERNELS) + 1))


def fail_to_compile(_text, device_type):
    raise RuntimeError("C++ compile error\nand much more")


def fail_with_a_message_in_latin1(_text, device_type):
    b"\xff".decode()  # as Inductor does


def compile_without_symbols(_text, device_type):
    return SimpleNamespace()


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (fail_to_compile, "C++ compile error"),
        (fail_with_a_message_in_latin1, "'utf-8' codec can't decode"),
        (compile_without_symbols, "has no attribute"),
    ],
)
def test_failed_compilation_is_logged_once(load, reason, compiler, caplog):
    compiler(load)
    assert not compile_kernel(*GEMM)
    assert not compile_kernel(*GEMM)
    (record,) = caplog.records
    message = "skinny_gemm.cpp cannot be compiled, so PyTorch's own operations are used: "
    assert record.getMessage().startswith(message)
    assert reason in record.getMessage()
    assert "and much more" not in record.getMessage()


def test_a_kernel_that_cannot_be_compiled_leaves_the_others(monkeypatch, caplog):
    source_of = kernels._source_of
    monkeypatch.setattr(
        kernels, "_source_of", lambda name, *dtype: "int 1;" if name == "broken" else source_of(name, *dtype)
    )
    assert compile_kernel(*GEMM, ("broken",))
    assert "cannot be compiled" not in caplog.text
    assert not compile_kernel("broken", torch.float32)
    assert "broken.cpp cannot be compiled, so PyTorch's own operations are used" in caplog.text


def test_other_dtypes_have_no_kernels():
    assert not is_loaded("skinny_gemm", torch.float64)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty cache of kernels."""
    monkeypatch.setattr(kernels, "cached_path", CACHED_PATH)
    monkeypatch.setenv(compile_cache.VARIABLE, str(compile_cache.compile_cache_folder()))  # compiles nothing anew
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "home"))
    compile_cache.warn_unused.cache_clear()


@pytest.fixture
def cached(home):
    """The path of a cached kernel, which was written under a umask that lets others write."""
    umask = os.umask(0)
    try:
        assert compile_kernel(*GEMM)
    finally:
        os.umask(umask)
    kernels._loaded.clear()  # the file itself is not loaded: a process reads a library once
    return kernels.cached_path(*GEMM)


def store(path, content):
    """Replace a cached library, and its digest."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # the file of a loaded library must not change
    path.write_bytes(content)
    kernels._digest_path(path).write_text(hashlib.sha256(content).hexdigest())


def test_a_later_process_compiles_nothing_but_what_was_truncated(cached):
    files = [kernels.cached_path(OPS), cached]
    assert sorted(cached.parent.iterdir()) == sorted([*files, *map(kernels._digest_path, files)])
    command = [sys.executable, "-c", LATER_PROCESS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.stdout.split() == ["False", "False", "True", "True", "False", "True", "True"], found.stderr


@pytest.mark.parametrize("what", ["no library", "another kernel", "other ops"])
def test_a_library_that_cannot_be_used_is_compiled_again(what, cached, caplog, tmp_path):
    content, path = b"no library", kernels.cached_path(OPS) if what == "other ops" else cached
    if what != "no library":
        source, library = tmp_path / "foreign.c", tmp_path / "foreign.so"
        source.write_text("int foreign(void) { return 1; }")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        content = library.read_bytes()
    store(path, content)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, logger="tide_hf.kernels"):
        if what == "other ops":  # this process has loaded its own
            patch.setattr(kernels, "_ops", None)
        assert not is_loaded(*GEMM)
    reason = ": it is another library" if what != "no library" else ""
    assert f"{path} cannot be loaded and is compiled again{reason}" in caplog.text
    assert not path.exists()
    assert compile_kernel(*GEMM)
    assert what == "other ops" or path.stat().st_size > 10_000


@pytest.mark.parametrize("what", ["linked file", "linked folder", "folder", "file", "digest", "owner"])
def test_a_library_that_others_may_have_written_is_not_loaded(what, cached, monkeypatch, caplog, tmp_path):
    folder = cached.parent
    match what:
        case "linked file" | "linked folder":
            linked = cached if what == "linked file" else folder
            linked.rename(tmp_path / "elsewhere")
            linked.symlink_to(tmp_path / "elsewhere")
        case "folder":
            folder.chmod(0o757)
        case "file" | "digest":
            (cached if what == "file" else kernels._digest_path(cached)).chmod(0o666)
        case "owner":
            if os.geteuid() == 0:
                os.chown(cached, 12345, -1)
            else:
                monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not is_loaded(*GEMM)
    if "folder" in what:
        assert f"{folder} is not used for compiled code: others may write to it, or it is a link" in caplog.text
        cached.unlink()
        kernels._store(SimpleNamespace(_name=kernels.__file__), cached)
        assert not cached.exists()


@pytest.mark.parametrize("name", ["file", "long" * 100])  # the second stands in for one that is closed to this user
def test_kernels_are_compiled_where_they_cannot_be_cached(name, home, caplog, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / name))
    assert not is_loaded(*GEMM)
    with caplog.at_level(logging.INFO, logger="tide_hf.kernels"):
        assert compile_kernel(*GEMM)
    assert "is not cached for later processes" in caplog.text


def test_a_library_that_can_neither_be_loaded_nor_removed_is_left(home, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    path = kernels.cached_path(*GEMM)
    store(path, b"no library")
    monkeypatch.setattr(Path, "unlink", refuse)  # the folder is another user's
    assert not is_loaded(*GEMM)
    assert path.read_bytes() == b"no library"


@pytest.mark.parametrize("change", ["cpu", "version", "source", "dtype", "vector width"])
def test_a_library_is_cached_for_one_cpu_and_one_pytorch(change, home, monkeypatch, tmp_path):
    def forget():
        kernels._features.cache_clear()
        kernels._file_name.cache_clear()

    forget()
    before, dtype = kernels.cached_path(*GEMM), torch.float32
    match change:
        case "cpu":
            monkeypatch.setattr(kernels, "CPU_INFO", tmp_path / "cpuinfo")
            kernels.CPU_INFO.write_text("processor: 0\nflags: few\n")
        case "version":
            monkeypatch.setattr(torch, "__version__", "2.0")
        case "source":
            monkeypatch.setattr(kernels, "_source_of", lambda *_: "other")
        case "dtype":
            dtype = torch.bfloat16
    forget()
    with inductor_config.patch({"cpp.simdlen": 256 if change == "vector width" else None}):
        assert kernels.cached_path("skinny_gemm", dtype) != before
    forget()
