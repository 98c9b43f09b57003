"""Kernels in C++ that Inductor's compiler builds for this CPU, and keeps on disk.

They are called by ops of PyTorch, so that compiled graphs call them without any Python: in a model of 30 layers a pass
over a few tokens makes 150 such calls, whose Python took a fifth of its time. The compiled engine has them compiled
when it first asks for them. Eager calls, which wait for no compiler, use what is there: kernels stay on disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._ops import OpOverload

from ...common.errors import first_line
from ...common.files import OTHERS_WRITE, cache_folder, is_ours, is_private_folder, make_private_folder, write_all_whole
from ..compile_cache import compiling

VALUES = {torch.float32: "float", torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}  # in the order of ops.cpp
KERNELS = ("stored_rows", "rounded_rows", "few_queries", "many_queries")  # the files, without their ending
EAGER_KERNELS = ("stored_rows", "many_queries")  # those that eager calls use where they are there
OPS = "ops"  # the file that makes ops of them, for any dtype
CPU_INFO = Path("/proc/cpuinfo")
EXPORTED = ("run", "use")  # what the library of a kernel exports, and that of `OPS`
# No compiler, or no place for what Inductor makes; a compiler whose messages are no UTF-8, as Inductor has it; and a
# library that does not export what is in it, as on Windows.
UNCOMPILABLE = (RuntimeError, OSError, ImportError, UnicodeError, AttributeError)

logger = logging.getLogger(__name__)

_loading = Lock()
_ops: Any = None  # the library of `OPS`, of which a second one would abort the process
_loaded: dict[tuple[str, torch.dtype], Any] = {}  # libraries of kernels; `None` for one that cannot be compiled
_traceable: set[str] = set()  # ops whose results traces know


@lru_cache
def load_op(name: str, dtype: torch.dtype, like: Callable[..., Tensor]) -> OpOverload | None:
    """The op of a kernel, once it can be called with values of a dtype.

    Args:
        name: One of `KERNELS`.
        dtype: Of the values.
        like: Takes the op's arguments and returns an empty result, which is all that a trace needs.

    Returns:
        `None` for other dtypes than `VALUES` has, and where nothing can be compiled.
    """
    if dtype not in VALUES or not compiled(name, dtype):
        return None
    if name not in _traceable:
        torch.library.register_fake(f"tide_hf::{name}", like)
        _traceable.add(name)
    return getattr(torch.ops.tide_hf, name).default


def compiled(name: str, dtype: torch.dtype, others: Iterable[str] = KERNELS) -> bool:
    """Have a kernel compiled and loaded; return whether it could be.

    Kernels are compiled at the same time, since that takes seconds for each. They are loaded one after the other.

    Args:
        name: One of `KERNELS`.
        dtype: One of `VALUES`.
        others: What is compiled with it, if it has to be.
    """
    with _loading:
        is_known = (name, dtype) in _loaded or _load_kept(name, dtype)
    if not is_known:
        _compile(name, dtype, {name, *others})
    return _loaded[name, dtype] is not None


def is_loaded(name: str, dtype: torch.dtype) -> bool:
    """Whether a kernel is there already, loaded or kept by an earlier process: nothing is compiled."""
    if dtype not in VALUES:
        return False
    if (name, dtype) not in _loaded and _loading.acquire(blocking=False):  # else another thread compiles, for seconds
        try:
            if (name, dtype) not in _loaded:
                _load_kept(name, dtype)
        finally:
            _loading.release()
    return _loaded.get((name, dtype)) is not None


def kept_path(name: str, dtype: torch.dtype | None = None) -> Path:
    """Where what was compiled for this CPU and PyTorch stays; Inductor's own folder may be a temporary one."""
    return cache_folder() / "kernels" / _file_name(name, dtype, inductor_config.cpp.simdlen)


@lru_cache  # calls ask, as long as there is none
def _file_name(name: str, dtype: torch.dtype | None, bits: int | None) -> str:
    facts = (_text_of(name, dtype), bits, torch.__version__, platform.machine(), platform.system(), _features())
    return f"{name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"


def _load_kept(name: str, dtype: torch.dtype) -> bool:
    global _ops  # noqa: PLW0603
    kernel = _kept(name, dtype)
    if kernel is None:
        return False
    _ops = _ops or _kept(OPS)
    if _ops is None:
        return False
    _use(name, dtype, kernel)
    return True


def _kept(name: str, dtype: torch.dtype | None = None) -> Any:
    """A library that an earlier process has compiled; `None` where there is none of use, which is compiled again."""
    path = kept_path(name, dtype)
    if not _is_whole(path):
        return None
    try:
        library = ctypes.CDLL(str(path))
        if hasattr(library, EXPORTED[name == OPS]):
            return library
        reason = "it is another library"
    except OSError as error:
        reason = first_line(error)
    logger.info("%s is of no use here: %s", path, reason)
    with suppress(OSError):  # of a folder that is someone else's
        path.unlink(missing_ok=True)
    return None


def _is_whole(path: Path) -> bool:
    """Whether a file is what this user, or the administrator, has kept there: its code runs as ours.

    It is compared with the digest beside it, since to load one that was cut short would end the process.
    """
    folder, digest = path.parent, _digest_path(path)
    if not (is_ours(path) and is_ours(digest)):
        return False
    if not is_private_folder(folder):
        _say_that_it_is_not_used(folder)
        return False
    try:
        return digest.read_text(encoding="ascii") == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeError):
        return False


@lru_cache
def _say_that_it_is_not_used(folder: Path) -> None:
    logger.warning("kernels in %s are not used, since others may write there: chmod go-w, or set TIDE_HF_HOME", folder)


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _compile(name: str, dtype: torch.dtype, together: set[str]) -> None:
    global _ops  # noqa: PLW0603
    try:
        with compiling(), _loading:  # in this order, since what is being compiled asks for kernels
            if (name, dtype) in _loaded:  # by another thread
                return
            _compile_all(together, dtype)
            _ops = _ops or _kept(OPS) or _cache().load(_text_of(OPS), device_type="cpu")
            kernel = _cache().load(_text_of(name, dtype), device_type="cpu")
            _use(name, dtype, kernel)
            _keep(_ops, kept_path(OPS))
            _keep(kernel, kept_path(name, dtype))
    except UNCOMPILABLE as error:
        _loaded[name, dtype] = None
        reason = first_line(error)
        logger.warning("PyTorch's own operations do what %s.cpp does, which cannot be compiled: %s", name, reason)


def _use(name: str, dtype: torch.dtype, kernel: Any) -> None:
    """Let the op of a kernel call it from now on."""
    place = list(VALUES).index(dtype)
    _ops.use(name.encode(), ctypes.c_int64(place), ctypes.cast(kernel.run, ctypes.c_void_p))
    _loaded[name, dtype] = kernel


def _keep(library: Any, path: Path) -> None:
    """Copy a library, if it is not there yet; a folder that cannot be written to keeps nothing."""
    try:
        make_private_folder(path.parent, mode=0o755)  # others may use what the administrator keeps
        if _is_whole(path) or not is_private_folder(path.parent):
            return
        content = Path(library._name).read_bytes()
        files = {_digest_path(path): hashlib.sha256(content).hexdigest().encode(), path: content}
        write_all_whole(files)
        for file in files:
            file.chmod(file.stat().st_mode & ~OTHERS_WRITE)
    except OSError as error:
        logger.info("%s is not kept for later processes: %s", path.name, error)


def _compile_all(names: set[str], dtype: torch.dtype) -> None:
    """Put kernels of a dtype, and their ops, into the cache on disk; what is there already is left as it is.

    What cannot be compiled says so when it is loaded.
    """
    missing = [_text_of(name, dtype) for name in names if not _is_whole(kept_path(name, dtype))]
    if _ops is None and not _is_whole(kept_path(OPS)):
        missing.insert(0, _text_of(OPS))  # which takes the longest
    with ThreadPoolExecutor(len(missing) or 1) as pool:
        for text in missing:
            _cache().load_async(text, device_type="cpu", submit_fn=pool.submit)


def _text_of(name: str, dtype: torch.dtype | None = None) -> str:
    """What is compiled: a kernel for a dtype, or `OPS`."""
    head, files = "", ["calls.h", f"{name}.cpp"]
    if dtype is not None:
        head = f"#include <c10/util/BFloat16.h>\n#include <c10/util/Half.h>\nusing Value = {VALUES[dtype]};\n"
        files.insert(0, "values.h")
    return head + "".join(Path(__file__).with_name(file).read_text() for file in files)


@lru_cache
def _features() -> str:
    """What this CPU can do, for which its kernels are compiled: a folder may be shared by machines."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.startswith(("flags", "Features"))][:1] or [platform.processor()]
    return "\n".join([torch.backends.cpu.get_cpu_capability(), *told])


def _cache() -> Any:
    """Inductor's cache of compiled C++; of no use to those who compile nothing, so the package does not wait for it."""
    from torch._inductor.codecache import CppCodeCache  # noqa: PLC0415

    return CppCodeCache
