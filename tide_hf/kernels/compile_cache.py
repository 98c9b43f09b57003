"""Where Inductor keeps what it compiles for this library, and who may compile at the moment.

Inductor loads code from its cache unchecked, and its own default is a folder in the temporary directory that all share,
which another user may have made first. So it is given a folder that nobody else can write to.
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

from ..common.errors import KernelError, describe, quoted
from ..common.files import cache_folder, is_private_folder, make_private_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADERS = ("_HEADER_DIR", "_HEADER_LOCK_DIR", "_precompile_header")  # of Inductor's codecache

logger = logging.getLogger(__name__)


@contextmanager
def compiling() -> Iterator[None]:
    """Trace and compile, one thread at a time, into [`compile_cache_folder`].

    Tracing changes `torch.nn.Module` for the whole process, and Dynamo and Inductor take no notice of traces in other
    threads. Their own lock is taken, so a caller's `torch.compile` in another thread waits too. The cache's place is an
    environment variable; once this is left, it is the caller's again, as is what they compile.

    Raises:
        KernelError: There is no folder to compile into.
    """
    from torch._dynamo.convert_frame import compile_lock  # noqa: PLC0415  # those who compile nothing do without

    with compile_lock:
        folder = compile_cache_folder()
        _remove_cut_short(folder)
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

    It is what the caller set `TORCHINDUCTOR_CACHE_DIR` to, or `inductor` in [`cache_folder`]. Where neither will do it
    is a temporary one of this process, and the log says so.

    Raises:
        KernelError: Not even that can be made.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

    asked = os.environ.get(VARIABLE)  # which PyTorch itself sets to its default
    wanted = [(cache_folder() / "inductor").absolute()]
    if asked and os.path.abspath(asked) != os.path.abspath(default_cache_dir()):
        wanted.insert(0, Path(asked).resolve())  # a link that the caller set leads where it does now
    for folder in wanted:
        try:
            make_private_folder(folder)
            if not is_private_folder(folder):
                _say_that_it_is_not_used(folder, "others may write to it, or it is a link")
            elif not os.access(folder, os.W_OK):
                _say_that_it_is_not_used(folder, "it cannot be written to")
            else:
                return folder
        except OSError as error:
            _say_that_it_is_not_used(folder, str(error))
    return _temporary_folder()


@cache
def _remove_cut_short(folder: Path) -> None:
    """Remove libraries whose linker was killed, which Inductor would try to load for ever; done once a process.

    Those that another process is about to write are locked by Inductor, and stay.
    """
    for library in folder.glob("*/*.so"):
        if _is_cut_short(library):
            key = library.name.partition(".")[0]
            with suppress(Timeout, OSError), FileLock(folder / "locks" / f"{key}.lock", timeout=0):
                library.unlink()


def _is_cut_short(library: Path) -> bool:
    """Whether an ELF file ends before its section headers do, which are its last part."""
    with library.open("rb") as file:
        header = file.read(64)
    if not (header.startswith(b"\x7fELF\x02\x01") or b"\x7fELF\x02\x01".startswith(header)):
        return False  # of another system
    if len(header) < 64:
        return True
    offset, (size, count) = struct.unpack_from("<Q", header, 40)[0], struct.unpack_from("<HH", header, 58)
    return offset == 0 or library.stat().st_size < offset + size * count


@cache
def _say_that_it_is_not_used(folder: Path, reason: str) -> None:
    logger.warning(
        "%s is not compiled into: %s. Make it yours alone (chmod go-w), or set TIDE_HF_HOME to another folder: without "
        "one every process compiles anew.",
        folder,
        reason,
    )


@cache
def _temporary_folder() -> Path:
    try:
        folder = tempfile.mkdtemp(prefix="tide_hf-")  # for this user alone
    except OSError as error:
        raise KernelError(
            describe(
                "there is no folder to compile into",
                got=quoted(error),
                expected=f"{cache_folder()}, or a temporary directory, that can be written to",
                do="Set TIDE_HF_HOME to a folder of yours.",
            )
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextmanager
def _headers_in(folder: Path) -> Iterator[None]:
    """Have Inductor precompile headers into a folder, where by itself it takes its default one, wherever its cache is.

    It remembers what it has precompiled for others, so the function that does is replaced as well.
    """
    from torch._inductor import codecache, config  # noqa: PLC0415

    if not all(hasattr(codecache, name) for name in HEADERS):  # as in PyTorch's later versions, maybe
        with config.patch(cpp_cache_precompile_headers=False):
            yield
        return
    before = [getattr(codecache, name) for name in HEADERS]
    place = folder / "precompiled_headers"
    try:
        for name, value in zip(HEADERS, (str(place), str(place / "locks"), _precompiler(folder)), strict=True):
            setattr(codecache, name, value)
        yield
    finally:
        for name, value in zip(HEADERS, before, strict=True):
            setattr(codecache, name, value)


@cache
def _precompiler(_folder: Path) -> Callable[..., str]:
    from torch._inductor import codecache  # noqa: PLC0415

    function: Any = codecache._precompile_header
    return cache(function.__wrapped__)
