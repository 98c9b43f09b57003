"""Files are there whole or not at all, for everyone who shares their folder."""

import errno
import os
import stat

import pytest

from tide_hf.common import files as folders
from tide_hf.common.files import write_whole


@pytest.fixture
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_others_may_read_what_is_written(tmp_path):
    file = tmp_path / "new" / "file"
    for content in (b"first", b"second"):
        write_whole(file, content)
        assert file.read_bytes() == content
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch, fails):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    file = tmp_path / "file"
    write_whole(file, b"before")
    monkeypatch.setattr(folders.os, fails, full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(file, b"after")
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]
