"""Files are written completely or not at all, with the folder's permissions, in the cache that the user chose."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from huggingface_hub import constants

from tide_hf.common import files
from tide_hf.common.files import MAX_JSON, MAX_NESTING, cache_folder, parse_json, write_atomically


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


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nested(MAX_NESTING + 1), "nested over 64 deep"),
        (b"[" * 10**5, "nested over 64 deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested over 64 deep"),
        (b" " * (MAX_JSON + 1), "more than 524288"),
        (b"1" * 5000, "integer string conversion"),
        (b"{", "Expecting"),
        (b"\xff\xff\xff", "decode"),
    ],
)
def test_json_that_is_too_long_or_deep_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        parse_json(content)


def test_other_json_is_read():
    assert parse_json(nested(MAX_NESTING)) == json.loads(nested(MAX_NESTING))
    assert parse_json('{"a": [1, "]["]}') == {"a": [1, "]["]}
