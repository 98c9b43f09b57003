"""The private folder that Inductor compiles into for this library, and the lock that is held during compilation.

Inductor loads code from its cache folder unchecked. Its default folder is in the temporary directory that all users
share, so another user may have created it first. Here Inductor gets a folder that nobody else can write to.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from ..common.errors import KernelError, quoted
from ..common.files import cache_folder, is_private_folder, make_private_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADER_FOLDER = "precompiled_headers"
BUILDING = "_CxxBuild"  # ends the name of the folder that Inductor keeps beside a file while it is built

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
        _remove_unfinished(folder)
        _keep_headers_in(folder)
        variables = {VARIABLE: str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
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
def _remove_unfinished(folder: Path) -> None:
    """Remove libraries and headers that a killed compiler left incomplete, which no later process could use; runs once.

    What another process is building is locked by Inductor, and stays.
    """
    for building in folder.glob(f"*/*{BUILDING}"):
        name = building.name.removesuffix(BUILDING)
        locks = (building.parent if building.parent.name == HEADER_FOLDER else folder) / "locks"
        with suppress(Timeout, OSError), FileLock(locks / f"{name.partition('.')[0]}.lock", timeout=0):
            for ending in (".o", ".so", ".gch"):
                building.with_name(f"{name}{ending}").unlink(missing_ok=True)


def _keep_headers_in(folder: Path) -> None:
    """Have Inductor precompile headers into a folder from now on, for a caller's own compilation too.

    Its default folder is a shared one, whatever `TORCHINDUCTOR_CACHE_DIR` says, and what it knows of that is forgotten.
    Without precompiled headers a first warm-up takes half a minute longer.
    """
    from torch._inductor import codecache, config  # noqa: PLC0415

    headers = folder / HEADER_FOLDER
    if not hasattr(codecache, "_HEADER_DIR"):  # in another version of PyTorch
        config.cpp_cache_precompile_headers = False
    elif str(headers) != codecache._HEADER_DIR:
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")
        codecache._precompile_header.cache_clear()


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
