"""The cache folder, checks of file permissions, atomic writes, and JSON that anybody may have written."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants

UNFINISHED = ".unfinished"  # suffix of files while they are written
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ABANDONED_AFTER = 3600  # seconds; writing a file takes only a few seconds
MAX_JSON = 2**19  # bytes; what it becomes takes up to 30 times as much memory, and as long to copy
MAX_NESTING = 64


def cache_folder() -> Path:
    """The folder of converted models, compiled kernels and steps, and measurements."""
    return Path(os.environ.get("TIDE_HF_HOME") or Path(constants.HF_HOME) / "tide_hf").expanduser()


def is_ours(path: Path, is_kind: Callable[[int], bool] = stat.S_ISREG) -> bool:
    """Whether `path` is of kind `is_kind` and only this user and the administrator can write to it; false for links."""
    try:
        found = path.lstat()
    except OSError:  # a missing file, or a folder that this user may not enter
        return False
    if not hasattr(os, "geteuid"):  # on Windows, modes say nothing about other users
        return is_kind(found.st_mode)
    return is_kind(found.st_mode) and found.st_uid in (0, os.geteuid()) and not found.st_mode & OTHERS_WRITE


def is_private_folder(folder: Path) -> bool:
    """Whether only this user and the administrator can put files into a folder, or replace the folder.

    The owners and groups of the parent folders are trusted.
    """
    above = folder.parent.resolve()
    return is_ours(folder, stat.S_ISDIR) and not any(map(_is_open_to_all, (above, *above.parents)))


def _is_open_to_all(folder: Path) -> bool:
    """Whether every user can rename other users' files in a folder; false for sticky folders such as `/tmp`."""
    mode = folder.stat().st_mode
    return hasattr(os, "geteuid") and bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def make_private_folder(folder: Path, mode: int = 0o700) -> None:
    """Create a folder that other users cannot write to, and its parents; existing folders are left as they are."""
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder.mkdir(mode=mode, exist_ok=True)


def write_atomically(contents: dict[Path, bytes]) -> None:
    """Write the content of each path in `contents`; no file is replaced before all contents are on the disk.

    Files get default permissions. An existing file or link is replaced, and a missing folder is created.
    """
    unfinished: dict[Path, Path] = {}
    try:
        for file, content in contents.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished[file] = file.with_name(f"{file.name}.{secrets.randbelow(10**15)}{UNFINISHED}")
            with unfinished[file].open("xb") as stream:  # "x" fails if somebody has put a link of that name there
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())  # otherwise a power cut could leave the name without the content
        for file, written in unfinished.items():
            os.replace(written, file)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def parse_json(content: bytes | str) -> Any:
    """Parse JSON of bounded size and depth, so that printing and copying what it holds cannot fail either.

    Raises:
        JSONDecodeError, UnicodeDecodeError: It is no JSON.
        ValueError: It is too long or nested too deep, or has a number too long for Python.
    """
    if len(content) > MAX_JSON:
        raise ValueError(f"JSON of {len(content)} bytes, more than {MAX_JSON}")
    too_deep = ValueError(f"JSON nested over {MAX_NESTING} deep")
    try:
        level = [parsed := json.loads(content)]
    except RecursionError:
        raise too_deep from None
    for _ in range(MAX_NESTING):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [one for values in inner for one in values]
    if level:
        raise too_deep
    return parsed


def remove_abandoned(file: Path) -> None:
    """Remove unfinished versions of `file` that are over an hour old, which killed processes have left behind."""
    for path in file.parent.glob(f"{file.name}.*{UNFINISHED}"):
        if not re.fullmatch(rf"\.\d+{re.escape(UNFINISHED)}", path.name.removeprefix(file.name)):
            continue
        with suppress(FileNotFoundError):  # another process has just finished or removed the file
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > ABANDONED_AFTER:
                path.unlink()
