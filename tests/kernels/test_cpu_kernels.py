"""Kernels for CPUs: compiled at the same time, loaded one after the other, and kept for later processes."""

import ctypes
import hashlib
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
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
KEPT_PATH = kernels.cached_path  # before tests are kept from meeting what is there
LATER = """
import torch
from tide_hf.kernels.cpu import cpp_kernels as kernels, gemm, weight_layouts
kernels._compile = None
print(kernels.is_loaded("prefill_attention", torch.float32), gemm.has_skinny_gemm(torch.float32))
state, weight = torch.randn(3, 40), torch.randn(7, 40)
print(torch.allclose(weight_layouts.PlainWeight(weight).apply(state, None), state @ weight.T, atol=1e-4))
print(kernels.is_loaded("skinny_gemm", torch.float32))
"""
CUT_SHORT = """
import torch
from tide_hf.kernels.cpu import cpp_kernels as kernels
print(kernels.is_loaded("skinny_gemm", torch.float32), kernels.compile_kernel("skinny_gemm", torch.float32, ()))
"""
LIBRARY = SimpleNamespace(_name="/nowhere/library.so", run=ctypes.CFUNCTYPE(None)(), register_kernel=lambda *_: None)

pytestmark = pytest.mark.usefixtures("fresh_kernels")


def test_each_file_is_a_kernel():
    assert {path.stem for path in Path(kernels.__file__).parent.glob("*.cpp")} == {*KERNELS, OPS}


def test_the_first_has_all_compiled_at_the_same_time(monkeypatch):
    files = [*KERNELS, OPS]
    together, loaded = threading.Barrier(len(files), timeout=WAIT_SECONDS), []
    futures = []

    def compiling(text, device_type, submit_fn):
        futures.append(submit_fn(together.wait))

    monkeypatch.setattr(kernels, "_ops", None)
    monkeypatch.setattr(CppCodeCache, "load_async", compiling)
    monkeypatch.setattr(CppCodeCache, "load", lambda text, device_type: loaded.append(text) or LIBRARY)
    assert compile_kernel(KERNELS[-1], torch.bfloat16)
    assert loaded == [kernels._source_of(OPS), kernels._source_of(KERNELS[-1], torch.bfloat16)]
    assert sorted(future.result() for future in futures) == list(range(len(files)))


def test_no_two_threads_load_at_once(monkeypatch):
    busy, together = threading.Lock(), threading.Barrier(len(KERNELS), timeout=WAIT_SECONDS)
    alone = []

    def loading(text, device_type):
        alone.append(busy.acquire(blocking=False))
        threading.Event().wait(0.05)  # in which another would come
        busy.release()
        return LIBRARY

    def ask(name):
        together.wait()
        return compile_kernel(name, torch.float32)

    monkeypatch.setattr(kernels, "_ops", None)
    monkeypatch.setattr(CppCodeCache, "load_async", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(CppCodeCache, "load", loading)
    with ThreadPoolExecutor(len(KERNELS)) as pool:
        assert all(pool.map(ask, KERNELS))
    assert alone == [True] * (len(KERNELS) + 1)  # the ops are one library


@pytest.mark.parametrize("lacking", ["load", "run"])
def test_what_a_compiler_makes_may_be_of_no_use(lacking, monkeypatch, caplog):
    def loading(_text, device_type):
        if lacking == "load":
            b"\xff".decode()  # what the compiler says, which Inductor takes for UTF-8
        return SimpleNamespace(_name="/nowhere/library.so", use=LIBRARY.use)

    monkeypatch.setattr(kernels, "_ops", None)
    monkeypatch.setattr(CppCodeCache, "load_async", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(CppCodeCache, "load", loading)
    assert not compile_kernel("skinny_gemm", torch.float32)
    assert "skinny_gemm.cpp cannot be compiled, so PyTorch's own operations are used" in caplog.text


def test_one_that_cannot_be_compiled_leaves_the_others(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "KERNELS", (*KERNELS, "broken"))
    text_of = kernels._source_of
    monkeypatch.setattr(
        kernels, "_source_of", lambda name, *dtype: "int 1;" if name == "broken" else text_of(name, *dtype)
    )
    assert compile_kernel("skinny_gemm", torch.float32)
    assert "cannot be compiled" not in caplog.text
    assert not compile_kernel("broken", torch.float32)
    assert "broken.cpp cannot be compiled, so PyTorch's own operations are used" in caplog.text


def keep(name, dtype, content):
    """Have a file where a kernel is kept, with a digest that fits."""
    path = kernels.cached_path(name, dtype)
    path.parent.mkdir(mode=0o755, exist_ok=True)
    path.unlink(missing_ok=True)  # what is loaded stays as it is
    path.write_bytes(content)
    kernels._digest_path(path).write_text(hashlib.sha256(content).hexdigest())
    return path


class TestKept:
    """Kernels that an earlier process has compiled."""

    @pytest.fixture(autouse=True)
    def _home(self, monkeypatch, tmp_path):
        monkeypatch.setattr(kernels, "cached_path", KEPT_PATH)
        monkeypatch.setenv(compile_cache.VARIABLE, str(compile_cache.compile_cache_folder()))  # or all compile anew
        monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path))

    def test_a_later_process_compiles_nothing(self):
        assert compile_kernel("skinny_gemm", torch.float32)
        files = [kernels.cached_path(OPS), kernels.cached_path("skinny_gemm", torch.float32)]
        files += [kernels._digest_path(file) for file in files]
        assert sorted(kernels.cached_path(OPS).parent.iterdir()) == sorted(files)
        found = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=120, check=False)
        assert found.stdout.split() == ["False", "True", "True", "True"], found.stderr

    def test_one_that_cannot_be_loaded_is_compiled_again(self, caplog):
        path = keep("skinny_gemm", torch.float32, b"no library")
        with caplog.at_level(logging.INFO, logger="tide_hf.kernels.cpu.cpp_kernels"):
            assert not is_loaded("skinny_gemm", torch.float32)
        assert f"{path} cannot be loaded and is compiled again" in caplog.text
        assert not path.exists()
        assert compile_kernel("skinny_gemm", torch.float32)
        assert is_loaded("skinny_gemm", torch.float32)
        assert path.stat().st_size > 10_000

    def test_one_that_was_cut_short_is_compiled_again(self):
        """To load it would end the process, so it is loaded in another one, which counts what it compiles."""
        assert compile_kernel("skinny_gemm", torch.float32)
        for name, dtype in (("skinny_gemm", torch.float32), (OPS, None)):
            path = kernels.cached_path(name, dtype)
            whole = path.read_bytes()
            path.write_bytes(whole[:5000])
            command = [sys.executable, "-c", CUT_SHORT]
            found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            assert found.stdout.split() == ["False", "True"], found.stderr
            assert path.read_bytes() == whole

    @pytest.mark.parametrize("foreign", ["skinny_gemm", OPS])
    def test_another_library_at_its_place_is_compiled_again(self, foreign, caplog, tmp_path):
        assert compile_kernel("skinny_gemm", torch.float32)
        kernels._loaded.clear()
        text = tmp_path / "foreign.c"
        text.write_text("int foreign(void) { return 1; }")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "foreign.so", text], check=True)
        path = keep(foreign, torch.float32 if foreign != OPS else None, (tmp_path / "foreign.so").read_bytes())
        with (
            pytest.MonkeyPatch.context() as patch,
            caplog.at_level(logging.INFO, logger="tide_hf.kernels.cpu.cpp_kernels"),
        ):
            if foreign == OPS:  # which this process would not look for again
                patch.setattr(kernels, "_ops", None)
            assert not is_loaded("skinny_gemm", torch.float32)
        assert f"{path} cannot be loaded and is compiled again: it is another library" in caplog.text
        assert not path.exists()

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_links_are_not_followed(self, kind, tmp_path):
        assert compile_kernel("skinny_gemm", torch.float32)
        path = kernels.cached_path("skinny_gemm", torch.float32)
        place = path if kind == "file" else path.parent
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
        kernels._loaded.clear()
        assert not is_loaded("skinny_gemm", torch.float32)

    @pytest.mark.parametrize("mode", [0o775, 0o757])
    def test_a_folder_that_others_may_write_to_is_not_used(self, mode, caplog):
        assert compile_kernel("skinny_gemm", torch.float32)
        path = kernels.cached_path("skinny_gemm", torch.float32)
        path.parent.chmod(mode)
        kernels._loaded.clear()
        assert not is_loaded("skinny_gemm", torch.float32)
        assert f"kernels in {path.parent} are not used, since others may write there" in caplog.text
        path.unlink()
        kernels._store(SimpleNamespace(_name=kernels.__file__), path)
        assert not path.exists()

    def test_a_folder_that_anybody_can_put_another_in_place_of_is_not_used(self, monkeypatch, tmp_path):
        home = tmp_path / "all" / "tide_hf"
        monkeypatch.setenv("TIDE_HF_HOME", str(home))
        assert compile_kernel("skinny_gemm", torch.float32)
        for mode, is_used in ((0o777, False), (0o1777, True)):
            home.parent.chmod(mode)
            kernels._loaded.clear()
            assert is_loaded("skinny_gemm", torch.float32) == is_used

    @pytest.mark.parametrize("by", ["mode", "owner"])
    def test_one_that_others_may_have_written_is_compiled_anew(self, by, monkeypatch):
        path, umask = kernels.cached_path("skinny_gemm", torch.float32), os.umask(0)
        try:
            assert compile_kernel("skinny_gemm", torch.float32)
        finally:
            os.umask(umask)
        kernels._loaded.clear()
        assert is_loaded("skinny_gemm", torch.float32)  # whatever the umask is
        kernels._loaded.clear()
        if by == "mode":
            path.chmod(0o666)
        elif os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not is_loaded("skinny_gemm", torch.float32)

    def test_a_folder_that_cannot_be_written_to_keeps_nothing(self, caplog, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "file"))
        with caplog.at_level(logging.INFO, logger="tide_hf.kernels.cpu.cpp_kernels"):
            assert compile_kernel("skinny_gemm", torch.float32)
        assert "is not cached for later processes" in caplog.text

    def test_one_that_can_neither_be_loaded_nor_removed_is_done_without(self, monkeypatch):
        def refusing(*_args, **_kwargs):
            raise PermissionError(13, "Permission denied")

        path = keep("skinny_gemm", torch.float32, b"no library")
        monkeypatch.setattr(Path, "unlink", refusing)  # the folder is someone else's
        assert not is_loaded("skinny_gemm", torch.float32)
        assert path.read_bytes() == b"no library"

    def test_a_folder_that_cannot_be_looked_into_holds_none(self, monkeypatch, tmp_path):
        home = tmp_path / ("long" * 100)  # stands in for one that is closed to this user, which none is to root
        with pytest.raises(OSError, match="too long"):
            home.stat()
        monkeypatch.setenv("TIDE_HF_HOME", str(home))
        assert not is_loaded("skinny_gemm", torch.float32)
        assert compile_kernel("skinny_gemm", torch.float32)

    @pytest.mark.parametrize("change", ["cpu", "version", "text", "dtype", "bits"])
    def test_it_is_for_one_cpu_and_one_pytorch(self, change, monkeypatch, tmp_path):
        for known in (kernels._features, kernels._file_name):
            known.cache_clear()
        before, dtype = kernels.cached_path("skinny_gemm", torch.float32), torch.float32
        match change:
            case "cpu":
                monkeypatch.setattr(kernels, "CPU_INFO", tmp_path / "cpuinfo")
                kernels.CPU_INFO.write_text("processor: 0\nflags: few\n")
                kernels._features.cache_clear()
            case "version":
                monkeypatch.setattr(torch, "__version__", "2.0")
            case "text":
                monkeypatch.setattr(kernels, "_source_of", lambda *_: "other")
            case "dtype":
                dtype = torch.bfloat16
        kernels._file_name.cache_clear()
        with inductor_config.patch({"cpp.simdlen": 256 if change == "bits" else None}):
            assert kernels.cached_path("skinny_gemm", dtype) != before
        for known in (kernels._features, kernels._file_name):
            known.cache_clear()


def test_other_dtypes_have_none():
    assert not is_loaded("skinny_gemm", torch.float64)
