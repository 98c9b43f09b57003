"""The cache folder, and atomic writes."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

UNFINISHED = ".unfinished"  # suffix of files while they are written
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ABANDONED_AFTER = 3600  # seconds; writing takes a few


def cache_folder() -> Path:
    """The folder of converted models and kernels."""
    return Path(os.environ.get("TIDE_HF_HOME") or Path(constants.HF_HOME) / "tide_hf").expanduser()


def is_ours(path: Path, is_kind: Callable[[int], bool] = stat.S_ISREG) -> bool:
    """Whether nobody but this user and the administrator can have written what `path` is; a link is nobody's.

    Args:
        path: A file, or a folder.
        is_kind: `stat.S_ISDIR` for a folder.
    """
    try:
        found = path.lstat()
    except OSError:  # also of a folder that is closed to this user
        return False
    if not hasattr(os, "geteuid"):  # Windows, whose modes say nothing of others
        return is_kind(found.st_mode)
    return is_kind(found.st_mode) and found.st_uid in (0, os.geteuid()) and not found.st_mode & OTHERS_WRITE


def is_private_folder(folder: Path) -> bool:
    """Whether nobody but this user and the administrator can put files into a folder, or another in its place.

    Whoever owns a folder above it, or is of its group, is trusted.
    """
    above = folder.parent.resolve()
    free_for_all = (_is_open_to_all(parent) for parent in (above, *above.parents))
    return is_ours(folder, stat.S_ISDIR) and not any(free_for_all)


def _is_open_to_all(folder: Path) -> bool:
    """Whether everybody can rename what others have in a folder; in a sticky one, as `/tmp` is, they can't."""
    mode = folder.stat().st_mode
    return hasattr(os, "geteuid") and bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def make_private_folder(folder: Path, mode: int = 0o700) -> None:
    """Make a folder that others cannot write to, and those above it; one that is there stays as it is.

    Raises:
        OSError: It cannot be made.
    """
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder.mkdir(mode=mode, exist_ok=True)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically, with the folder's default permissions.

    Args:
        file: Its path; an existing file or link is replaced, a missing folder created.
        content: Its content.

    Raises:
        OSError: The disk is full, or the folder takes no file.
    """
    write_all_whole({file: content})


def write_all_whole(contents: dict[Path, bytes]) -> None:
    """Write files as [`write_whole`] does; the first is put in place only after all are on the disk.

    Args:
        contents: Content by path.

    Raises:
        OSError: The disk is full, or a folder takes no file.
    """
    unfinished: dict[Path, Path] = {}
    try:
        for file, content in contents.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished[file] = file.with_name(f"{file.name}.{secrets.randbelow(10**15)}{UNFINISHED}")
            with unfinished[file].open("xb") as stream:  # which fails where a link of that name is waiting
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())  # or a power cut could leave the name without the content
        for file, whole in unfinished.items():
            os.replace(whole, file)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def remove_abandoned(file: Path) -> None:
    """Remove unfinished files that killed processes left beside a file.

    Those of the last hour stay, because another process may be writing them.
    """
    for path in file.parent.glob(f"{file.name}.*{UNFINISHED}"):
        if not re.fullmatch(rf"\.\d+{re.escape(UNFINISHED)}", path.name.removeprefix(file.name)):
            continue
        with suppress(FileNotFoundError):  # the other process has just finished
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > ABANDONED_AFTER:
                path.unlink()
