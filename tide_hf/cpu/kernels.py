"""Kernels in C++ that Inductor's compiler builds for this CPU, and keeps on disk.

They are ops of PyTorch, so that compiled graphs call them without any Python: in a model of 30 layers a pass over a few
tokens makes 150 such calls, whose Python took a fifth of its time. The compiled engine has them compiled when it first
asks for them. Eager calls, which wait for no compiler, use what is there: a kernel stays, for later processes.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._ops import OpOverload

from ..errors import first_line
from ..folders import cache_folder, write_whole

VALUES = {torch.float32: "float", torch.bfloat16: "at::BFloat16", torch.float16: "at::Half"}
KERNELS = ("stored_rows", "rounded_rows", "few_queries", "many_queries")  # the files, without their ending
EAGER_KERNELS = ("stored_rows", "many_queries")  # those that eager calls use where they are there
CPU_INFO = Path("/proc/cpuinfo")

logger = logging.getLogger(__name__)

_loading = Lock()
_loaded: dict[str, bool] = {}  # by op, of those that were asked for; not those that cannot be compiled
_traceable: set[str] = set()  # ops whose results traces know; each can be told once, but loaded again


@lru_cache
def load_op(name: str, dtype: torch.dtype, like: Callable[..., Tensor]) -> OpOverload | None:
    """The op of a file in this folder.

    Args:
        name: One of `KERNELS`.
        dtype: Of its values.
        like: Takes the op's arguments and returns an empty result, which is all that a trace needs.

    Returns:
        `None` for other dtypes than `VALUES` has, and where nothing can be compiled.
    """
    op = compiled(name, dtype) if dtype in VALUES else None
    if op is None:
        return None
    if op not in _traceable:
        torch.library.register_fake(f"tide_hf::{op}", like)
        _traceable.add(op)
    return getattr(torch.ops.tide_hf, op).default


def compiled(name: str, dtype: torch.dtype, others: Iterable[str] = KERNELS) -> str | None:
    """Have a kernel compiled and loaded; return the name of its op, `None` where it cannot be.

    Kernels are compiled at the same time, since that takes seconds for each. They are loaded one after the other: where
    two threads register ops at once, PyTorch can abort the process.

    Args:
        name: One of `KERNELS`.
        dtype: One of `VALUES`.
        others: What is compiled with it, if it has to be.
    """
    op = _op_of(name, dtype)
    with _loading:
        if op not in _loaded and not _load_kept(name, dtype):
            _compile(name, dtype, {name, *others})
    return op if _loaded[op] else None


def is_loaded(name: str, dtype: torch.dtype) -> bool:
    """Whether a kernel is there already, loaded or kept by an earlier process: nothing is compiled."""
    if dtype not in VALUES:
        return False
    op = _op_of(name, dtype)
    if op not in _loaded and _loading.acquire(blocking=False):  # else another thread compiles, for seconds
        try:
            if op not in _loaded:
                _load_kept(name, dtype)
        finally:
            _loading.release()
    return _loaded.get(op, False)


def kept_path(name: str, dtype: torch.dtype) -> Path:
    """Where a kernel stays that was compiled for this CPU and PyTorch; Inductor's own folder may be a temporary one."""
    return cache_folder() / "kernels" / _file_name(name, dtype, _op_of(name, dtype))


@lru_cache  # calls ask, as long as there is none
def _file_name(name: str, dtype: torch.dtype, op: str) -> str:
    facts = (_text_of(name, dtype), torch.__version__, platform.machine(), platform.system(), _features())
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return f"{op}-{digest}.so"


def _load_kept(name: str, dtype: torch.dtype) -> bool:
    path = kept_path(name, dtype)
    if not path.is_file():
        return False
    try:
        torch.ops.load_library(path)
    except OSError as error:
        logger.info("%s is of no use here: %s", path, first_line(error))
        path.unlink(missing_ok=True)  # so that it is compiled again
        return False
    _loaded[_op_of(name, dtype)] = True
    return True


def _compile(name: str, dtype: torch.dtype, together: set[str]) -> None:
    op = _op_of(name, dtype)
    try:
        _compile_all(together, dtype)
        library = _cache().load(_text_of(name, dtype), device_type="cpu")
        _loaded[op] = True
    except (RuntimeError, OSError, ImportError) as error:  # of Inductor: no compiler, or no place for what it makes
        _loaded[op] = False
        reason = first_line(error)
        logger.warning("PyTorch's own operations do what %s.cpp does, which cannot be compiled: %s", name, reason)
    else:
        _keep(library._name, kept_path(name, dtype))


def _keep(library: str, path: Path) -> None:
    """Copy a library; a folder that cannot be written to keeps nothing."""
    try:
        write_whole(path, Path(library).read_bytes())
    except OSError as error:
        logger.info("%s is not kept for later processes: %s", path.name, error)


def _compile_all(names: set[str], dtype: torch.dtype) -> None:
    """Put kernels of a dtype into the cache on disk; what is there already is left as it is.

    A kernel that cannot be compiled says so when it is loaded.
    """
    with ThreadPoolExecutor(len(names)) as pool:
        for name in names:
            if not kept_path(name, dtype).is_file():
                _cache().load_async(_text_of(name, dtype), device_type="cpu", submit_fn=pool.submit)


def _op_of(name: str, dtype: torch.dtype) -> str:
    bits = inductor_config.cpp.simdlen  # of vectors, where they are not to be the longest that this CPU has
    return f"{name}_{VALUES[dtype].removeprefix('at::').lower()}" + (f"_{bits}" if bits is not None else "")


def _text_of(name: str, dtype: torch.dtype) -> str:
    """What is compiled."""
    op = _op_of(name, dtype)
    head = f"#include <c10/util/BFloat16.h>\n#include <c10/util/Half.h>\nusing Value = {VALUES[dtype]};\n"
    head += f'#define NAME "{op}"\n'
    return head + "".join(Path(__file__).with_name(file).read_text() for file in ("values.h", f"{name}.cpp"))


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
