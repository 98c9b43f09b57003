"""The private folder that Inductor compiles into for this library, and the lock that is held during compilation.

Inductor loads code from its cache folder unchecked. Its default folder is in the temporary directory that all users
share, so another user may have created it first. Here Inductor gets a folder that nobody else can write to.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..common.errors import KernelError, quoted
from ..common.files import cache_folder, is_private_folder, make_private_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADERS = ("_HEADER_DIR", "_HEADER_LOCK_DIR", "_precompile_header")  # attributes of Inductor's codecache
HEADER_FOLDER = "precompiled_headers"

logger = logging.getLogger(__name__)


@contextmanager
def compiling() -> Iterator[None]:
    """Context for tracing and compiling, one thread at a time, into [`compile_cache_folder`].

    Tracing changes `torch.nn.Module` for the whole process, and Dynamo and Inductor do not expect traces in other
    threads. Dynamo's own lock is taken, so a caller's `torch.compile` in another thread waits too. The environment
    variables for the cache folder are restored afterwards, so that a caller's own cache stays where it was.
    """
    from torch._dynamo.convert_frame import compile_lock  # noqa: PLC0415

    with compile_lock:
        folder = compile_cache_folder()
        _remove_truncated(folder)
        variables = {VARIABLE: str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            with _headers_in(folder):
                yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def compile_cache_folder() -> Path:
    """The folder that Inductor compiles into: one that nobody but this user can write to.

    It is the caller's `TORCHINDUCTOR_CACHE_DIR`, or else `inductor` in [`cache_folder`]. If neither is private, it is a
    temporary folder of this process, and a warning is logged. Raises [`KernelError`] if no folder can be created.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

    requested = os.environ.get(VARIABLE)  # PyTorch itself sets the variable to its default
    candidates = [(cache_folder() / "inductor").absolute()]
    if requested and os.path.abspath(requested) != os.path.abspath(default_cache_dir()):
        candidates.insert(0, Path(requested).resolve())  # the caller's folder may be a link, followed once
    for folder in candidates:
        try:
            make_private_folder(folder)
            if not is_private_folder(folder):
                warn_unused(folder, "others may write to it, or it is a link")
            elif not os.access(folder, os.W_OK):
                warn_unused(folder, "it cannot be written to")
            else:
                return folder
        except OSError as error:
            warn_unused(folder, str(error))
    return temporary_folder()


@cache
def _remove_truncated(folder: Path) -> None:
    """Remove libraries that a killed linker left incomplete, which Inductor would try to load for ever; runs once.

    A library that another process is linking is locked by Inductor, and stays.
    """
    for library in folder.glob("*/*.so"):
        if _is_truncated(library):
            key = library.name.partition(".")[0]
            with suppress(Timeout, OSError), FileLock(folder / "locks" / f"{key}.lock", timeout=0):
                library.unlink()


def _is_truncated(library: Path) -> bool:
    """Whether an ELF file is cut off before the end of its section headers, which come last."""
    with library.open("rb") as file:
        header = file.read(64)
    if not (header.startswith(b"\x7fELF\x02\x01") or b"\x7fELF\x02\x01".startswith(header)):
        return False  # not a 64-bit ELF file: from another system
    if len(header) < 64:
        return True
    offset, (size, count) = struct.unpack_from("<Q", header, 40)[0], struct.unpack_from("<HH", header, 58)
    return offset == 0 or library.stat().st_size < offset + size * count


@cache
def warn_unused(folder: Path, reason: str) -> None:
    """Log once why compiled code is neither read from a folder nor stored there."""
    logger.warning(
        "%s is not used for compiled code: %s. Make it yours alone (chmod go-w), or set TIDE_HF_HOME to another "
        "folder: without one every process compiles anew.",
        folder,
        reason,
    )


@cache
def temporary_folder() -> Path:
    """A folder of this process; raises [`KernelError`] if it cannot be created."""
    try:
        folder = tempfile.mkdtemp(prefix="tide_hf-")  # for this user alone
    except OSError as error:
        raise KernelError(
            "there is no folder to compile into",
            got=quoted(error),
            expected=f"{cache_folder()}, or a temporary directory, that can be written to",
            do="Set TIDE_HF_HOME to a folder of yours.",
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextmanager
def _headers_in(folder: Path) -> Iterator[None]:
    """Have Inductor precompile headers into a folder; otherwise it always uses a folder in its default cache.

    The precompiling function is replaced as well, since it remembers headers that it has precompiled elsewhere.
    """
    from torch._inductor import codecache, config  # noqa: PLC0415

    if not all(hasattr(codecache, name) for name in HEADERS):  # in another version of PyTorch
        with config.patch(cpp_cache_precompile_headers=False):
            yield
        return
    headers = folder / HEADER_FOLDER
    values = (str(headers), str(headers / "locks"), _precompiler(folder))
    before = {name: getattr(codecache, name) for name in HEADERS}
    try:
        vars(codecache).update(zip(HEADERS, values, strict=True))
        yield
    finally:
        vars(codecache).update(before)


@cache
def _precompiler(_folder: Path) -> Callable[..., str]:
    from torch._inductor import codecache  # noqa: PLC0415

    function: Any = codecache._precompile_header
    return cache(function.__wrapped__)
