"""Files are written completely or not at all, with the folder's permissions, in the cache that the user chose."""

import errno
import os
import stat
from pathlib import Path

import pytest
from huggingface_hub import constants

from tide_hf.common import files
from tide_hf.common.files import cache_folder, write_atomically


def test_files_have_the_default_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        file = tmp_path / "new" / "file"
        for content in (b"first", b"second"):
            write_atomically({file: content})
            assert file.read_bytes() == content
            assert stat.S_IMODE(file.stat().st_mode) == 0o644
    finally:
        os.umask(before)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch, fails):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    file = tmp_path / "file"
    write_atomically({file: b"before"})
    monkeypatch.setattr(files.os, fails, full)
    with pytest.raises(OSError, match="no space left"):
        write_atomically({file: b"after"})
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_the_cache_follows_the_users_settings(monkeypatch):
    monkeypatch.setenv("TIDE_HF_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.delenv("TIDE_HF_HOME")
    assert cache_folder() == Path(constants.HF_HOME).expanduser() / "tide_hf"
