"""C++ kernels: compiled once, and cached where nobody else can write."""

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppCodeCache

from tide_hf.kernels import compile_cache
from tide_hf.kernels.cpu import cpp_kernels as kernels
from tide_hf.kernels.cpu.cpp_kernels import OPS, compile_kernel, is_loaded

CACHED_PATH = kernels.cached_path  # before conftest.py hides the cache
GEMM = "skinny_gemm", torch.float32
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


def test_a_kernel_that_cannot_be_compiled_is_logged_and_leaves_the_others(monkeypatch, caplog):
    source_of = kernels._source_of
    monkeypatch.setattr(
        kernels, "_source_of", lambda name, *dtype: "int 1;" if name == "broken" else source_of(name, *dtype)
    )
    assert compile_kernel(*GEMM, ("broken",))
    assert "cannot be compiled" not in caplog.text
    assert not compile_kernel("broken", torch.float32)
    assert "broken.cpp cannot be compiled, so PyTorch's own operations are used" in caplog.text


def test_failed_compilation_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_ops", None)
    monkeypatch.setattr(CppCodeCache, "load_async", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(CppCodeCache, "load", lambda *_args, **_kwargs: b"\xff".decode())  # a message in Latin-1
    assert not compile_kernel(*GEMM)
    assert not compile_kernel(*GEMM)
    (record,) = caplog.records
    assert "'utf-8' codec can't decode" in record.getMessage()


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


def test_a_later_process_compiles_nothing_but_what_was_truncated(cached):
    files = [kernels.cached_path(OPS), cached]
    assert sorted(cached.parent.iterdir()) == sorted([*files, *map(kernels._digest_path, files)])
    command = [sys.executable, "-c", LATER_PROCESS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert found.stdout.split() == ["False", "False", "True", "True", "False", "True", "True"], found.stderr


def refuse(*_args, **_kwargs):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("what", ["no library", "another library"])
def test_a_library_that_cannot_be_used_is_compiled_again(what, cached, caplog, tmp_path):
    content = b"no library"
    if what == "another library":
        source, library = tmp_path / "foreign.c", tmp_path / "foreign.so"
        source.write_text("int foreign(void) { return 1; }")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        content = library.read_bytes()
    cached.unlink()  # the file of a loaded library must not change
    cached.write_bytes(content)
    kernels._digest_path(cached).write_text(hashlib.sha256(content).hexdigest())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)  # the folder is another user's
        assert not is_loaded(*GEMM)
    assert cached.read_bytes() == content
    with caplog.at_level(logging.INFO, logger="tide_hf.kernels"):
        assert not is_loaded(*GEMM)
    assert f"{cached} cannot be loaded and is compiled again" in caplog.text
    assert not cached.exists()
    assert compile_kernel(*GEMM)
    assert cached.stat().st_size > 10_000


@pytest.mark.parametrize("what", ["linked file", "linked folder", "folder", "digest", "owner"])
def test_a_library_that_others_may_have_written_is_not_loaded(what, cached, monkeypatch, caplog, tmp_path):
    folder = cached.parent
    match what:
        case "linked file" | "linked folder":
            linked = cached if what == "linked file" else folder
            linked.rename(tmp_path / "elsewhere")
            linked.symlink_to(tmp_path / "elsewhere")
        case "folder":
            folder.chmod(0o757)
        case "digest":
            kernels._digest_path(cached).chmod(0o666)
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


def test_kernels_are_compiled_where_they_cannot_be_cached(home, caplog, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, logger="tide_hf.kernels"):
        assert compile_kernel(*GEMM)
    assert "is not cached for later processes" in caplog.text


@pytest.mark.parametrize("change", ["cpu", "version", "source", "dtype", "vector width"])
def test_a_library_is_cached_for_one_cpu_and_one_pytorch(change, home, monkeypatch, tmp_path):
    def path(dtype=torch.float32):
        kernels._features.cache_clear()
        kernels._file_name.cache_clear()
        return kernels.cached_path("skinny_gemm", dtype)

    before, dtype = path(), torch.bfloat16 if change == "dtype" else torch.float32
    with pytest.MonkeyPatch.context() as patch:
        match change:
            case "cpu":
                patch.setattr(kernels, "CPU_INFO", tmp_path / "cpuinfo")
                kernels.CPU_INFO.write_text("processor: 0\nflags: few\n")
            case "version":
                patch.setattr(torch, "__version__", "2.0")
            case "source":
                patch.setattr(kernels, "_source_of", lambda *_: "other")
            case "vector width":
                patch.setattr(inductor_config.cpp, "simdlen", 256)
        assert path(dtype) != before
    assert path() == before  # and nothing of the change is remembered
