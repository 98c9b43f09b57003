"""Kernels in C++ that Inductor's compiler builds for this CPU when they are first asked for, and keeps on disk.

They are ops of PyTorch, so that compiled graphs call them without any Python: in a model of 30 layers a pass over a few
tokens makes 150 such calls, whose Python took a fifth of its time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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

VALUES = {torch.float32: "float", torch.bfloat16: "at::BFloat16"}
KERNELS = ("stored_rows", "rounded_rows", "few_queries", "many_queries")  # the files, without their ending

logger = logging.getLogger(__name__)

_loading = Lock()
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


@lru_cache
def compiled(name: str, dtype: torch.dtype) -> str | None:
    """Have a kernel compiled and loaded; return the name of its op, `None` where it cannot be.

    All kernels of a dtype are compiled at the same time, since that takes seconds for each. They are loaded one after
    the other: where two threads register ops at once, PyTorch can abort the process.
    """
    op, text = _source(name, dtype)
    try:
        with _loading:
            _compile_all(dtype)
            _cache().load(text, device_type="cpu")
    except (RuntimeError, OSError, ImportError) as error:  # of Inductor: no compiler, or no place for what it makes
        reason = first_line(error)
        logger.warning("PyTorch's own operations do what %s.cpp does, which cannot be compiled: %s", name, reason)
        return None
    return op


def _compile_all(dtype: torch.dtype) -> None:
    """Put all kernels of a dtype into the cache on disk; what is there already is left as it is.

    A kernel that cannot be compiled says so when it is loaded.
    """
    with ThreadPoolExecutor(len(KERNELS)) as pool:
        for name in KERNELS:
            _cache().load_async(_source(name, dtype)[1], device_type="cpu", submit_fn=pool.submit)


def _source(name: str, dtype: torch.dtype) -> tuple[str, str]:
    """The name of a kernel's op, and the text that is compiled."""
    bits = inductor_config.cpp.simdlen  # of vectors, where they are not to be the longest that this CPU has
    op = f"{name}_{VALUES[dtype].removeprefix('at::').lower()}" + (f"_{bits}" if bits is not None else "")
    head = f'#include <c10/util/BFloat16.h>\nusing Value = {VALUES[dtype]};\n#define NAME "{op}"\n'
    return op, head + Path(__file__).with_name(f"{name}.cpp").read_text()


def _cache() -> Any:
    """Inductor's cache of compiled C++; of no use to those who compile nothing, so the package does not wait for it."""
    from torch._inductor.codecache import CppCodeCache  # noqa: PLC0415

    return CppCodeCache
