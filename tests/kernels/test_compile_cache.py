"""Inductor's compile cache: nobody else can write to it, and what a caller compiles stays where it was."""

import logging
import os
import stat
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch._inductor import codecache
from torch._inductor.codecache import CppCodeCache
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tide_hf.common.errors import KernelError
from tide_hf.engines.steps import step_graphs
from tide_hf.engines.steps.step_graphs import compile_graph, traced
from tide_hf.kernels import compile_cache
from tide_hf.kernels.compile_cache import VARIABLE, compile_cache_folder, compiling
from tide_hf.kernels.cpu import cpp_kernels as kernels

_opened: list[str] = []


def _note(event, args):
    if event in ("open", "ctypes.dlopen") and isinstance(args[0], str):
        _opened.append(args[0])


@pytest.fixture(autouse=True)
def _fresh_facts(monkeypatch):
    for function in (compile_cache._say_that_it_is_not_used, compile_cache._temporary_folder):
        function.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    compile_cache._temporary_folder.cache_clear()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The cache folder of a user whose temporary folder is `tmp_path / "tmp"`."""
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "home"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_of_ones_own(home):
    before = os.umask(0)
    try:
        assert compile_cache_folder() == home / "inductor"
    finally:
        os.umask(before)
    assert mode_of(home / "inductor") == 0o700
    assert compile_cache_folder() == home / "inductor"


@pytest.mark.parametrize("why", ["group", "all", "link", "owner", "a folder above", "no folder"])
def test_one_that_others_may_write_to_is_not_used(home, monkeypatch, caplog, why):
    folder = compile_cache_folder()
    match why:
        case "group":
            folder.chmod(0o770)
        case "all":
            folder.chmod(0o1777)
        case "link":
            folder.rename(home / "elsewhere")
            folder.symlink_to(home / "elsewhere")
        case "owner":
            uid = os.geteuid()
            if uid == 0:
                os.chown(folder, 12345, -1)
            else:
                monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        case "a folder above":
            home.chmod(0o777)
        case "no folder":
            folder.rmdir()
            folder.write_text("a file")
    found = compile_cache_folder()
    assert found.parent == home.parent / "tmp"
    assert mode_of(found) == 0o700
    assert compile_cache_folder() == found
    assert caplog.text.count(f"{folder} is not compiled into") == 1


def test_one_that_cannot_be_written_to_is_not_used(home, monkeypatch):
    compile_cache_folder()
    monkeypatch.setattr(os, "access", lambda *_: False)  # which root always may
    assert compile_cache_folder().parent == home.parent / "tmp"


def test_without_any_folder_nothing_is_compiled(home, monkeypatch):
    home.write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(home / "none"))
    with pytest.raises(KernelError, match=r"there is no folder to compile into: got .*Set TIDE_HF_HOME"):
        compile_cache_folder()


def test_one_that_the_caller_names_is_used_if_nobody_else_can_write_to_it(home, monkeypatch, caplog):
    named = home.parent / "named"
    monkeypatch.setenv(VARIABLE, str(named))
    assert compile_cache_folder() == named
    (home.parent / "link").symlink_to(named)
    monkeypatch.setenv(VARIABLE, str(home.parent / "link"))
    assert compile_cache_folder() == named
    named.chmod(0o777)
    assert compile_cache_folder() == home / "inductor"
    assert f"{named} is not compiled into" in caplog.text
    monkeypatch.setenv(VARIABLE, default_cache_dir())  # as PyTorch itself sets it
    assert compile_cache_folder() == home / "inductor"


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_what_a_caller_compiles_stays_where_it_was(home, monkeypatch, before):
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    own = [getattr(codecache, name) for name in compile_cache.HEADERS]
    inductor = home / "inductor"

    def fail():
        with compiling(), compiling():
            assert os.environ[VARIABLE] == str(inductor)
            assert os.environ["TRITON_CACHE_DIR"] == str(inductor / "triton")
            assert Path(codecache._HEADER_DIR) == inductor / "precompiled_headers"
            assert codecache._precompile_header is not own[2]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ.get(VARIABLE) is None
    assert os.environ.get("TRITON_CACHE_DIR") == before
    assert [getattr(codecache, name) for name in compile_cache.HEADERS] == own


def test_where_headers_have_no_place_of_their_own_none_are_precompiled(home, monkeypatch):
    monkeypatch.delattr(codecache, "_HEADER_DIR")
    with compiling():
        assert not torch._inductor.config.cpp_cache_precompile_headers
    assert torch._inductor.config.cpp_cache_precompile_headers


def test_a_library_whose_linker_was_killed_is_made_anew(home):
    with compiling():
        library = Path(CppCodeCache.load('extern "C" int whole() { return 7; }', device_type="cpu")._name)
    whole, other = library.read_bytes(), library.with_name("other.main.so")
    for content, is_whole in ((whole, True), (whole[:-1], False), (whole[:1000], False), (b"", False), (b"MZ", True)):
        other.write_bytes(content)
        compile_cache._remove_cut_short.cache_clear()
        with compiling():
            assert other.exists() == is_whole
    other.write_bytes(b"")
    compile_cache._remove_cut_short.cache_clear()
    with FileLock(home / "inductor" / "locks" / "other.lock"), compiling():  # another process links it
        assert other.exists()
    assert library.read_bytes() == whole


def test_one_thread_at_a_time(home):
    busy, together, alone = threading.Lock(), threading.Barrier(4, timeout=30), []

    def enter(_):
        together.wait()
        with compiling():
            alone.append(busy.acquire(blocking=False))
            threading.Event().wait(0.02)  # in which another would come
            busy.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(4)))
    assert alone == [True] * 4


def test_all_that_is_compiled_goes_there(home, monkeypatch, fresh_kernels):
    places = []

    def backend(graph, _inputs):
        places.append(os.environ[VARIABLE])
        return graph

    def load(*_args, **_kwargs):
        places.append(os.environ[VARIABLE])
        raise OSError("no compiler")

    for name in ("load_async", "load"):
        monkeypatch.setattr(CppCodeCache, name, load)
    monkeypatch.setattr(kernels, "_ops", None)
    assert not kernels.compile_kernel("skinny_gemm", torch.float32)
    assert len(places) == 1
    monkeypatch.setattr(step_graphs, "inductor_compile", lambda graph, fakes, options: backend(graph, fakes))
    compile_graph(traced(torch.sin, torch.ones(3)), [torch.ones(3)])
    assert len(places) == 2
    assert set(places) == {str(home / "inductor")}


def test_nothing_is_looked_for_in_the_shared_folder(monkeypatch):
    """Inductor compiles into the folder of this machine's user, so that a header need not be precompiled anew."""
    sys.addaudithook(_note)  # which can't be removed again
    folder = compile_cache_folder()
    inputs = [torch.randn(5, 7), torch.randn(7)]
    graph = traced(lambda left, right: (torch.sin(left * right + os.getpid() / 3).sum(1),), *inputs)
    _opened.clear()
    found = compile_graph(graph, inputs)(*inputs)
    seen = list(_opened)
    torch.testing.assert_close(found[0], graph(*inputs)[0])
    assert any(Path(path).is_relative_to(folder) for path in seen)
    assert [path for path in seen if Path(path).is_relative_to(default_cache_dir())] == []


def test_the_log_says_what_to_do(home, caplog):
    compile_cache_folder().chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        compile_cache_folder()
    assert "Make it yours alone (chmod go-w), or set TIDE_HF_HOME" in caplog.text
