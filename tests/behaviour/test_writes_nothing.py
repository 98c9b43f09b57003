"""Loading routers writes nothing but the Hub's cache, whatever their folder holds."""

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tide_hf import TIDEModelForCausalLM, TIDERouters

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {f"os.{name}" for name in ("chmod", "chown", "link", "mkdir", "mkfifo", "remove", "rename", "rmdir")}
CHANGES |= {f"os.{name}" for name in ("setxattr", "symlink", "truncate", "utime")}

_watching: list[list[Path]] = []


def _note(event, args):
    if not _watching:
        return
    if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
        args = args[:1]
    elif event == "os.symlink":
        args = args[1:]  # the first is where it leads
    elif event not in CHANGES:
        return
    _watching[-1] += [Path(os.fsdecode(arg)) for arg in args if isinstance(arg, (str, bytes, os.PathLike))]


@pytest.fixture(scope="module")
def written():
    """What notes the paths that Python writes to, wherever they are."""
    sys.addaudithook(_note)  # which can't be removed again

    @contextmanager
    def watch():
        _watching.append([])
        try:
            yield _watching[-1]
        finally:
            _watching.clear()

    return watch


def listing(folder):
    """What a folder holds; a link counts as itself."""
    found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {path: (stat.st_ino, stat.st_size, stat.st_mode, stat.st_mtime_ns) for path, stat in found.items()}


def test_the_audit_hook_sees_writes(written, tmp_path):
    with written() as paths:
        (tmp_path / "file").write_text("content")
        (tmp_path / "file").rename(tmp_path / "other")
    assert paths == [tmp_path / "file", tmp_path / "file", tmp_path / "other"]


@pytest.mark.parametrize("state", ["whole", "without config", "another's config", "damaged"])
def test_loading_leaves_a_folder_unchanged(written, routers_folder, tmp_path, state):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in (".saving-killed", ".saving-other"):  # as a save that was killed may have left them
        (routers_folder / name).mkdir()
        shutil.copy(routers_folder / "config.json", routers_folder / name)
        (routers_folder / name / "config.copy").symlink_to(outside)
    config = routers_folder / "config.json"
    match state:
        case "without config":
            config.unlink()
        case "another's config":
            sha256 = TIDERouters.from_pretrained(routers_folder).config.weights_sha256
            config.write_text(config.read_text().replace(sha256, "0" * 64))
        case "damaged":
            (routers_folder / "model.safetensors").write_bytes(b"damaged")
    before = listing(tmp_path)
    with written() as paths:
        if state in ("without config", "damaged"):
            with pytest.raises((OSError, ValueError), match="Expected"):
                TIDERouters.from_pretrained(routers_folder)
        else:
            TIDERouters.from_pretrained(routers_folder)
    assert paths == []
    assert listing(tmp_path) == before
    assert outside.read_text() == "mine"


def test_a_read_only_folder_can_be_loaded(routers_folder):
    for path in (*routers_folder.iterdir(), routers_folder):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert TIDERouters.from_pretrained(routers_folder).exit_layers == [2]
    finally:
        routers_folder.chmod(0o755)


def test_loading_from_the_hub_writes_only_its_cache(written, model_hub, on_hub, tmp_path, monkeypatch):
    def others():
        return {path: found for path, found in listing(tmp_path).items() if cache not in (path, *path.parents)}

    monkeypatch.chdir(tmp_path)  # where relative paths lead; those that shutil removes lie in a folder that it has open
    cache = tmp_path / "cache"
    before = others()
    with written() as paths:
        TIDERouters.from_pretrained("org/base-tide")
    assert paths
    assert [path for path in paths if path.is_absolute() and cache not in (path, *path.parents)] == []
    assert others() == before


def test_attaching_leaves_the_folder_of_the_routers_unchanged(tiny_llama, routers_folder):
    before = listing(routers_folder)
    TIDEModelForCausalLM.attach(tiny_llama(), routers=routers_folder)
    assert listing(routers_folder) == before
