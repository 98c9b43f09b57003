"""The C++ kernels for CPUs of `hub_kernels/tide-kernels`: fetched ready-made, or built once on this machine and kept.

Kernels are PyTorch ops, so that compiled graphs call them without Python: a pass over a few tokens in a model of 30
layers makes 150 such calls, whose Python overhead was a fifth of the pass's time. The compiled engine builds kernels
at first use. Eager calls never wait for a compiler: they use kernels that were fetched, or built before or while TIDE
was attached.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch._ops import OpOverload

from ...common.errors import KernelError, first_line
from ...common.files import (
    ABANDONED_AFTER,
    OTHERS_WRITE,
    cache_folder,
    is_ours,
    is_private_folder,
    make_private_folder,
)
from ..compile_cache import HEADER_FOLDER, compile_cache_folder, temporary_folder, warn_unused
from ..fetch import check_files, fetch, sources_alone

# With the types of values that stage.py knows.
CPU_DTYPES = {torch.float32: "float", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half"}
# RuntimeError: stage.py's BuildError, or PyTorch's of a library that it cannot register.
UNBUILDABLE = (RuntimeError, OSError, ImportError)
PROJECT = Path(__file__).parent.parent / "hub"  # hub_kernels/tide-kernels, by a link

logger = logging.getLogger(__name__)

_loading = Lock()
_loaded: dict[torch.dtype, ModuleType | None] = {}  # the kernels for a dtype; `None` where they cannot be built


@lru_cache
def load_op(name: str, dtype: torch.dtype) -> OpOverload | None:
    """Return the op of a kernel for a dtype; build the kernels unless they are there.

    Returns `None` for dtypes that `CPU_DTYPES` lacks, and if the kernels cannot be built.
    """
    if dtype not in CPU_DTYPES or not build_kernels(dtype):
        return None
    op: OpOverload = getattr(_loaded[dtype], name)
    return op


def are_ready(dtype: torch.dtype) -> bool:
    """Whether the kernels for a dtype can run without a compiler: they were fetched, or built earlier."""
    if dtype not in CPU_DTYPES:
        return False
    if dtype not in _loaded and _loading.acquire(blocking=False):  # fails while another thread builds
        try:
            if dtype not in _loaded:
                _load_kept(dtype)
        finally:
            _loading.release()
    return _loaded.get(dtype) is not None


def build_kernels(dtype: torch.dtype) -> bool:
    """Build and load the kernels for a dtype, unless they are ready; return whether they are then."""
    if dtype not in CPU_DTYPES:
        return False
    if dtype not in _loaded:
        with _loading:
            if dtype not in _loaded and not _load_kept(dtype):
                _loaded[dtype] = _build(dtype)
    return _loaded[dtype] is not None


def obstacle_to_build(dtype: torch.dtype) -> str | None:
    """The reason why kernels for a dtype of `CPU_DTYPES` cannot be built, or not kept; `None` if nothing is known."""
    try:
        stage_module().check_cpu()
        folder = built_folder(dtype)
        can_keep = _can_keep(folder) and all(map(_is_trusted, folder.glob("torch-*")))
    except UNBUILDABLE as error:
        return first_line(error)
    return None if can_keep else f"builds cannot be kept in {folder}"


def fetch_kernels(repo: str, revision: str | None) -> str | None:
    """Load ready-made kernels for this CPU, for all dtypes; return the reason if that fails. Tried once a process."""
    found = _fetched(repo, revision)
    if isinstance(found, str):
        return found
    missing = {dtype: found for dtype in CPU_DTYPES if _loaded.get(dtype) is None}
    if missing:
        with _loading:
            _loaded.update(missing)
        load_op.cache_clear()  # it remembers where there were none
    return None


@cache
def spare_probes() -> None:
    """Have Inductor take this CPU's vector instructions as usable, if kernels that use them were built here.

    Otherwise it compiles and loads a probe for each kind of them: seconds the first time, one in every later process.
    """
    from torch._inductor import config, cpu_vec_isa  # noqa: PLC0415

    kept = cache_folder() / "kernels"
    files = [Path(str(module.__file__)) for module in _loaded.values() if module is not None]
    if any(file.is_relative_to(kept) for file in files):
        with config.patch({"cpp.vec_isa_ok": True}):
            cpu_vec_isa.valid_vec_isa_list()  # keeps its result


@contextmanager
def precompiling_header() -> Iterator[None]:
    """Have Inductor precompile its header for CPUs, unless it has; a thread does, in seconds in which others can trace.

    The context belongs inside [`compiling`].
    """
    from torch._inductor import codecache, config  # noqa: PLC0415
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # noqa: PLC0415

    def precompile() -> None:
        with suppress(RuntimeError, OSError):  # the compilation in the context fails for the same reason, and says so
            codecache.CppPythonBindingsCodeCache.load_pybinding_async([], 'extern "C" void kernel() {}')

    has_header = any((compile_cache_folder() / HEADER_FOLDER).glob("*.gch"))
    if has_header or not config.cpp_cache_precompile_headers:
        yield
        return
    spare_probes()
    pick_vec_isa()  # keeps its result, and must not run in two threads
    thread = Thread(target=precompile)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def ready_kernels(dtype: torch.dtype) -> ModuleType | None:
    """The kernels for a dtype, if they [`are_ready`]."""
    return _loaded[dtype] if are_ready(dtype) else None


@cache
def _fetched(repo: str, revision: str | None) -> ModuleType | str:
    found = fetch(repo, revision, "cpu")
    if isinstance(found, ModuleType) and not hasattr(found, "skinny_gemm"):
        return f"{repo} has no build for this CPU"  # but one in Triton, which only tests run on a CPU
    return found


def built_folder(dtype: torch.dtype) -> Path:
    """The folder that holds the kernels built on this machine for a dtype, this PyTorch, kind of CPU and compiler.

    Without a compiler the name is a pattern, which fits the builds of all compilers.
    """
    key = _key(dtype, stage_module().cpu_level())
    return cache_folder() / "kernels" / f"{key}-{_compiler_key(os.environ.get('CXX'))}"


@lru_cache  # called by every pass while there are no kernels
def _key(dtype: torch.dtype, level: str) -> str:
    sources = b"".join(file.read_bytes() for file in stage_module().cpu_files())
    facts = (hashlib.sha256(sources).hexdigest(), torch.__version__, sys.platform)
    return f"{str(dtype).removeprefix('torch.')}-{level}-{_digest(facts)}"


@lru_cache
def _compiler_key(_variable: str | None) -> str:
    facts = stage_module().compiler_facts()
    return _digest(facts) if facts else "*"


def _digest(facts: tuple[str, ...]) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


@cache
def stage_module() -> Any:
    """The module `stage` of the kernel project, which is not part of a package."""
    spec: Any = spec_from_file_location("tide_kernels_stage", PROJECT / "stage.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(dtype: torch.dtype) -> ModuleType | None:
    try:
        return _load(_built(dtype))
    except UNBUILDABLE as error:
        reason = first_line(error)
        logger.warning("no C++ kernels for %s, so PyTorch's own operations are used: %s", dtype, reason)
        return None


def _load_kept(dtype: torch.dtype) -> bool:
    """Load the kernels that an earlier process built and kept, if there are any and nobody can have changed them."""
    try:
        folder = built_folder(dtype)
        found = next(filter(None, map(_kept, folder.parent.glob(f"{folder.name}/torch-*"))), None)
        if found is not None:
            _loaded[dtype] = found
            return True
    except UNBUILDABLE as error:
        logger.info("no C++ kernels are loaded for %s: %s", dtype, first_line(error))
    return False


def _kept(variant: Path) -> ModuleType | None:
    """Load a kept build, if it can be trusted; one that was changed, or cannot be loaded, is removed.

    Its code runs in this process, and a truncated library would end it.
    """
    if not _is_trusted(variant):
        return None
    try:
        check_files(variant)
        return _load(variant)
    except (ValueError, *UNBUILDABLE) as error:
        logger.info("%s cannot be loaded and is built again: %s", variant, first_line(error))
        shutil.rmtree(variant, ignore_errors=True)  # the folder may belong to another user
        return None


def _load(variant: Path) -> ModuleType:
    with sources_alone():
        module: ModuleType = stage_module().load_variant(variant)
    return module


def _is_trusted(variant: Path) -> bool:
    """Whether only this user and the administrator can have written a kept build; else, log it once."""
    if not _is_private(variant.parent):
        return False
    are_ours = is_ours(variant, stat.S_ISDIR) and all(map(is_ours, variant.iterdir()))
    if not are_ours:
        _warn_refused(variant)
    return are_ours


@cache
def _warn_refused(variant: Path) -> None:
    logger.warning(
        "%s is not loaded, since others may have written to it, or it is a link. Remove it, and the kernels are built "
        "again, once: until then attach() builds none, and tide_warm_up() builds them anew in each process.",
        variant,
    )


def _built(dtype: torch.dtype) -> Path:
    """Build the kernels for a dtype; return their folder, one that later processes find, or else a temporary one."""
    stage = stage_module()
    stage.check_cpu()
    folder = built_folder(dtype)

    def build_in(place: Path) -> Path:
        variant: Path = stage.stage_cpu(place, [stage.cpu_level()], [CPU_DTYPES[dtype]])
        return variant

    if not _can_keep(folder):
        return build_in(_elsewhere())
    try:
        with FileLock(f"{folder}.lock", timeout=stage.BUILD_SECONDS):  # processes that start together share a build
            _remove_leftovers(folder)
            found = next(filter(_kept, folder.glob("torch-*")), None)
            return _move_into(folder, build_in) if found is None else found
    except Timeout as timeout:
        raise KernelError(
            "another process builds them and does not end",
            got=f"a lock on {timeout.lock_file} for {stage.BUILD_SECONDS:.0f} s",
            expected="a build within that time",
            do="End that process, or set TIDE_HF_HOME to another folder.",
        ) from None


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed builds have left, in a folder that is locked, and in others after a while."""
    for leftover in folder.parent.glob("*/.*"):
        with suppress(FileNotFoundError):  # another process has just finished or removed it
            if leftover.parent == folder or time.time() - leftover.lstat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(leftover, ignore_errors=True)


def _move_into(folder: Path, build_in: Callable[[Path], Path]) -> Path:
    """Have a variant built beside its place, and move it there once it has been loaded; return where it is."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as unfinished:
        variant = build_in(Path(unfinished))
        _load(variant)
        for file in variant.iterdir():
            file.chmod(file.stat().st_mode & ~OTHERS_WRITE)
        variant.chmod(0o755)
        kept = folder / variant.name
        try:
            os.rename(variant, kept)
        except OSError:  # a process was faster that sees no locks of this one, or something refused is in the way
            if _kept(kept) is None:
                return Path(shutil.move(variant, _elsewhere()))
        return kept


def _can_keep(folder: Path) -> bool:
    """Create a folder for builds; return whether this user can keep one there, and others cannot write to it."""
    try:
        make_private_folder(folder.parent, mode=0o755)  # others may use what the administrator builds
        make_private_folder(folder, mode=0o755)
    except OSError as error:
        logger.info("C++ kernels are not kept for later processes: %s", error)
        return False
    return _is_private(folder) and os.access(folder, os.W_OK)


def _is_private(folder: Path) -> bool:
    """Whether only this user and the administrator can write to a folder for builds; else, log it once."""
    is_private = is_private_folder(folder.parent) and is_private_folder(folder)
    if not is_private:
        warn_unused(folder.parent, "others may write to it, or it is a link")
    return is_private


def _elsewhere() -> Path:
    """A folder that lasts as long as this process."""
    return Path(tempfile.mkdtemp(dir=temporary_folder()))
