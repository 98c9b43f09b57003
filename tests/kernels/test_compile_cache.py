"""Inductor's compile cache: nobody else can write to it, and a caller's own cache stays where it was."""

import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch._inductor import codecache, config, cpp_builder
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tide_hf.common.errors import KernelError
from tide_hf.engines.steps.graphs import compile_graph, traced
from tide_hf.kernels import compile_cache
from tide_hf.kernels.compile_cache import VARIABLE, compile_cache_folder, compiling

_opened: list[str] = []


def _note_opened_files(event, args):
    if event in ("open", "ctypes.dlopen") and isinstance(args[0], str):
        _opened.append(args[0])


@pytest.fixture(autouse=True)
def _no_folder_is_remembered(monkeypatch):
    for function in (compile_cache.warn_unused, compile_cache.temporary_folder):
        function.cache_clear()
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    compile_cache.temporary_folder.cache_clear()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The cache folder of a user whose temporary folder is `tmp_path / "tmp"`."""
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "home"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_private_whatever_the_umask_is(home):
    before = os.umask(0)
    try:
        assert compile_cache_folder() == home / "inductor"
    finally:
        os.umask(before)
    assert mode_of(home / "inductor") == 0o700


@pytest.mark.parametrize("why", ["group", "link", "owner", "a folder above", "no folder", "read-only"])
def test_a_folder_that_others_may_write_to_is_not_used(home, monkeypatch, caplog, why):
    folder = compile_cache_folder()
    match why:
        case "group":
            folder.chmod(0o770)
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
        case "read-only":
            monkeypatch.setattr(os, "access", lambda *_: False)  # root may always write
    found = compile_cache_folder()
    assert found.parent == home.parent / "tmp"
    assert mode_of(found) == 0o700
    assert compile_cache_folder() == found
    assert caplog.text.count(f"{folder} is not used for compiled code") == 1
    assert "Make it yours alone (chmod go-w), or set TIDE_HF_HOME" in caplog.text


def test_without_any_folder_nothing_is_compiled(home, monkeypatch):
    home.write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(home / "none"))
    with pytest.raises(KernelError, match=r"there is no folder to compile into: got .*Set TIDE_HF_HOME"):
        compile_cache_folder()


def test_a_callers_own_folder_is_used_if_nobody_else_can_write_to_it(home, monkeypatch):
    own = home.parent / "own"
    monkeypatch.setenv(VARIABLE, str(own))
    assert compile_cache_folder() == own
    (home.parent / "link").symlink_to(own)
    monkeypatch.setenv(VARIABLE, str(home.parent / "link"))
    assert compile_cache_folder() == own
    own.chmod(0o777)
    assert compile_cache_folder() == home / "inductor"
    monkeypatch.setenv(VARIABLE, default_cache_dir())  # as PyTorch itself sets it
    assert compile_cache_folder() == home / "inductor"


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_the_callers_cache_is_restored_after_an_error(home, monkeypatch, before):
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    inductor = home / "inductor"

    def fail():
        assert os.environ[VARIABLE] == str(inductor)
        assert os.environ["TRITON_CACHE_DIR"] == str(inductor / "triton")
        assert Path(codecache._HEADER_DIR) == inductor / "precompiled_headers"
        raise KeyError

    with pytest.raises(KeyError), compiling(), compiling():
        fail()
    assert os.environ.get(VARIABLE) is None
    assert os.environ.get("TRITON_CACHE_DIR") == before


def test_headers_that_were_precompiled_elsewhere_are_forgotten(home, monkeypatch):
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(home.parent / "shared"))
    monkeypatch.setattr(codecache, "_precompile_header", cache(lambda: codecache._HEADER_DIR))
    assert codecache._precompile_header() == str(home.parent / "shared")
    with compiling():
        assert codecache._precompile_header() == str(home / "inductor" / "precompiled_headers")


def test_headers_are_not_precompiled_where_their_folder_cannot_be_set(home, monkeypatch):
    monkeypatch.delattr(codecache, "_HEADER_DIR")
    monkeypatch.setattr(config, "cpp_cache_precompile_headers", True)
    with compiling():
        assert not config.cpp_cache_precompile_headers


@pytest.mark.parametrize("kind", ["library", "header"])
def test_what_a_killed_compiler_left_is_removed(home, monkeypatch, kind):
    def kill(command, **_kwargs):
        if "/precompiled_headers/" in command or kind == "library":
            raise KeyboardInterrupt
        Path(command.split(" -o ")[1].split()[0]).touch()  # the preprocessed header

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", kill)
    with pytest.raises(KeyboardInterrupt), compiling(), config.patch(cpp_cache_precompile_headers=kind == "header"):
        codecache.CppPythonBindingsCodeCache.load_pybinding([], f'extern "C" void kernel() {{}} // {kind}')
    (building,) = compile_cache_folder().glob("*/*_CxxBuild")
    name, endings = building.name.removesuffix("_CxxBuild"), ("gch",) if kind == "header" else ("o", "so")
    files = [building.with_name(f"{one}.{ending}") for one in (name, "other") for ending in endings]
    for file in files:
        file.touch()
    locks = (home / "inductor" if kind == "library" else building.parent) / "locks"
    compile_cache._remove_unfinished.cache_clear()
    with FileLock(locks / f"{name.partition('.')[0]}.lock"), compiling():
        assert all(file.exists() for file in files)  # another process builds it
    compile_cache._remove_unfinished.cache_clear()
    with compiling():
        assert [file for file in files if file.exists()] == files[len(endings) :]


def test_graphs_are_compiled_into_the_folder_and_nothing_is_read_from_the_shared_one():
    """Inductor compiles into the folder of this machine's user, so that no header is precompiled anew."""
    sys.addaudithook(_note_opened_files)  # it cannot be removed again
    folder = compile_cache_folder()
    inputs = [torch.randn(5, 7), torch.randn(7)]
    graph = traced(lambda left, right: (torch.sin(left * right + os.getpid() / 3).sum(1),), *inputs)
    _opened.clear()
    found = compile_graph(graph, inputs)(*inputs)
    opened = [Path(path) for path in _opened]
    torch.testing.assert_close(found[0], graph(*inputs)[0])
    assert any(path.is_relative_to(folder) for path in opened)
    assert [path for path in opened if path.is_relative_to(default_cache_dir())] == []
