"""C++ kernels, built for this CPU by Inductor's compiler and cached on disk.

Kernels are PyTorch ops, so that compiled graphs call them without Python: a pass over a few tokens in a model of 30
layers makes 150 such calls, whose Python overhead was a fifth of the pass's time. The compiled engine compiles kernels
at first use. Eager calls never wait for a compiler: they use only kernels that are cached already.
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
from ...common.files import (
    OTHERS_WRITE,
    cache_folder,
    is_ours,
    is_private_folder,
    make_private_folder,
    write_atomically,
)
from ..compile_cache import compiling, warn_unused

# In the order of kDtypes in ops.cpp.
CPP_TYPES = {torch.float32: "float", torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}
# The fake implementation of each kernel's op, by file name without .cpp. ops.cpp documents the ops' arguments.
KERNELS: dict[str, Callable[..., Tensor]] = {
    "skinny_gemm": lambda input, weights, *_: empty_product(input, weights),
    "groupwise_gemm": lambda input, weight, *_: empty_product(input, [weight]),
    "decode_attention": lambda query, *_: query.new_empty(query.shape),
    "prefill_attention": lambda query, *_: query.new_empty(query.transpose(1, 2).shape),
}
EAGER_KERNELS = ("skinny_gemm", "prefill_attention")  # the kernels that eager calls use once they are cached
OPS = "ops"  # ops.cpp, which registers the PyTorch ops of the kernels for all dtypes
CPU_INFO = Path("/proc/cpuinfo")
# Errors that are raised if there is no compiler or no writable folder, if compiler messages are not UTF-8, as Inductor
# expects, or if a library does not export its symbols, as on Windows.
UNCOMPILABLE = (RuntimeError, OSError, ImportError, UnicodeError, AttributeError)

logger = logging.getLogger(__name__)

_loading = Lock()
_ops: Any = None  # the library of `OPS`; loading it twice would abort the process
_loaded: dict[tuple[str, torch.dtype], Any] = {}  # libraries; `None` where compilation failed
_traceable: set[str] = set()  # ops with a registered fake implementation


@lru_cache
def load_op(name: str, dtype: torch.dtype) -> OpOverload | None:
    """Return the op of a kernel for a dtype; compile the kernel unless it is cached.

    Returns `None` for dtypes that `CPP_TYPES` lacks, and if the kernel cannot be compiled.
    """
    if dtype not in CPP_TYPES or not compile_kernel(name, dtype):
        return None
    if name not in _traceable:
        torch.library.register_fake(f"tide_hf::{name}", KERNELS[name])
        _traceable.add(name)
    return getattr(torch.ops.tide_hf, name).default


def compile_kernel(name: str, dtype: torch.dtype, others: Iterable[str] = KERNELS) -> bool:
    """Compile and load a kernel; return whether that succeeded.

    Each kernel takes seconds to compile, so `others` are compiled in parallel with it, but not loaded.
    """
    with _loading:
        is_known = (name, dtype) in _loaded or _load_cached(name, dtype)
    if not is_known:
        _compile(name, dtype, {name, *others})
    return _loaded[name, dtype] is not None


def is_loaded(name: str, dtype: torch.dtype) -> bool:
    """Whether a kernel can run without compiling: it is loaded, or an earlier process has cached it."""
    if dtype not in CPP_TYPES:
        return False
    if (name, dtype) not in _loaded and _loading.acquire(blocking=False):  # fails while another thread compiles
        try:
            if (name, dtype) not in _loaded:
                _load_cached(name, dtype)
        finally:
            _loading.release()
    return _loaded.get((name, dtype)) is not None


def cached_path(name: str, dtype: torch.dtype | None = None) -> Path:
    """The path of the library for this CPU and PyTorch, outside Inductor's cache, which may be a temporary folder."""
    return cache_folder() / "kernels" / _file_name(name, dtype, inductor_config.cpp.simdlen)


@lru_cache  # called by every pass while there is no kernel
def _file_name(name: str, dtype: torch.dtype | None, bits: int | None) -> str:
    facts = (_source_of(name, dtype), bits, torch.__version__, platform.machine(), platform.system(), _features())
    return f"{name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"


def _load_cached(name: str, dtype: torch.dtype) -> bool:
    global _ops  # noqa: PLW0603
    kernel = _cached_library(name, dtype)
    _ops = _ops or (_cached_library(OPS) if kernel is not None else None)
    if kernel is None or _ops is None:
        return False
    _register(name, dtype, kernel)
    return True


def _cached_library(name: str, dtype: torch.dtype | None = None) -> Any:
    """Load a library that an earlier process compiled; `None` if there is none, or it cannot be loaded."""
    path = cached_path(name, dtype)
    if not _is_trusted(path):
        return None
    try:
        library = ctypes.CDLL(str(path))
        if hasattr(library, "register_kernel" if name == OPS else "run"):
            return library
        reason = "it is another library"
    except OSError as error:
        reason = first_line(error)
    logger.info("%s cannot be loaded and is compiled again: %s", path, reason)
    with suppress(OSError):  # the folder may belong to another user
        path.unlink(missing_ok=True)
    return None


def _is_trusted(path: Path) -> bool:
    """Whether a library is unchanged since this user or root stored it; its code will run in this process.

    The file is compared with the digest beside it, since loading a truncated library would end the process.
    """
    digest = _digest_path(path)
    if not (is_ours(path) and is_ours(digest)):
        return False
    if not is_private_folder(path.parent):
        warn_unused(path.parent, "others may write to it, or it is a link")
        return False
    try:
        return digest.read_text(encoding="ascii") == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeError):
        return False


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _compile(name: str, dtype: torch.dtype, together: set[str]) -> None:
    global _ops  # noqa: PLW0603
    try:
        with compiling(), _loading:  # in this order, since compiling a graph loads kernels
            if (name, dtype) in _loaded:  # another thread has loaded it
                return
            _compile_missing(together, dtype)
            _ops = _ops or _cached_library(OPS) or _inductor_cache().load(_source_of(OPS), device_type="cpu")
            kernel = _inductor_cache().load(_source_of(name, dtype), device_type="cpu")
            _register(name, dtype, kernel)
            _store(_ops, cached_path(OPS))
            _store(kernel, cached_path(name, dtype))
    except UNCOMPILABLE as error:
        _loaded[name, dtype] = None
        logger.warning("%s.cpp cannot be compiled, so PyTorch's own operations are used: %s", name, first_line(error))


def _compile_missing(names: set[str], dtype: torch.dtype) -> None:
    """Compile the named kernels for a dtype, and `OPS`, unless they are cached.

    Compiler errors surface when the kernel is loaded.
    """
    missing = [_source_of(name, dtype) for name in names if not _is_trusted(cached_path(name, dtype))]
    if _ops is None and not _is_trusted(cached_path(OPS)):
        missing.insert(0, _source_of(OPS))  # first, since it takes the longest
    with ThreadPoolExecutor(len(missing) or 1) as pool:
        for source in missing:
            _inductor_cache().load_async(source, device_type="cpu", submit_fn=pool.submit)


def empty_product(input: Tensor, weights: list[Tensor]) -> Tensor:
    """The fake implementation of a product of the input with concatenated weights."""
    return input.new_empty((*input.shape[:-1], sum(weight.shape[0] for weight in weights)))


def _register(name: str, dtype: torch.dtype, kernel: Any) -> None:
    """Register a kernel with its op."""
    index = list(CPP_TYPES).index(dtype)
    _ops.register_kernel(name.encode(), ctypes.c_int64(index), ctypes.cast(kernel.run, ctypes.c_void_p))
    _loaded[name, dtype] = kernel


def _store(library: Any, path: Path) -> None:
    """Copy a library to the cache, unless it is cached already or the folder is read-only or not private."""
    try:
        make_private_folder(path.parent, mode=0o755)  # others may use what the administrator stores
        if _is_trusted(path) or not is_private_folder(path.parent):
            return
        content = Path(library._name).read_bytes()
        files = {_digest_path(path): hashlib.sha256(content).hexdigest().encode(), path: content}
        write_atomically(files)
        for file in files:
            file.chmod(file.stat().st_mode & ~OTHERS_WRITE)
    except OSError as error:
        logger.info("%s is not cached for later processes: %s", path.name, error)


def _source_of(name: str, dtype: torch.dtype | None = None) -> str:
    """The source of a kernel for a dtype, or of `OPS`."""
    head, files = "", ["arguments.h", f"{name}.cpp"]
    if dtype is not None:
        head = f"#include <c10/util/BFloat16.h>\n#include <c10/util/Half.h>\nusing Value = {CPP_TYPES[dtype]};\n"
        files.insert(0, "vectorized.h")
    return head + "".join(Path(__file__).with_name(file).read_text() for file in files)


@lru_cache
def _features() -> str:
    """The CPU's features, which are part of the cache key since machines may share a folder."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1] or [platform.processor()]
    return "\n".join([torch.backends.cpu.get_cpu_capability(), *flags])


def _inductor_cache() -> Any:
    """Inductor's cache of compiled C++, imported here since it would slow down `import tide_hf`."""
    from torch._inductor.codecache import CppCodeCache  # noqa: PLC0415

    return CppCodeCache
