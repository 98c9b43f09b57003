"""Kernels in C++ that Inductor's compiler builds for this CPU when they are first asked for, and keeps on disk.

They are ops of PyTorch, so that compiled graphs call them without any Python: in a model of 30 layers a pass over a few
tokens makes 150 such calls, whose Python took a fifth of its time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._ops import OpOverload

from ..errors import first_line

VALUES = {torch.float32: "float", torch.bfloat16: "at::BFloat16"}
KERNELS = ("few_rows", "rounded_rows", "few_queries", "many_queries")  # the files, without their ending

logger = logging.getLogger(__name__)

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
    """Have a kernel compiled and loaded; return the name of its op, `None` where it cannot be."""
    bits = inductor_config.cpp.simdlen  # of vectors, where they are not to be the longest that this CPU has
    op = f"{name}_{VALUES[dtype].removeprefix('at::').lower()}" + (f"_{bits}" if bits is not None else "")
    head = f'#include <c10/util/BFloat16.h>\nusing Value = {VALUES[dtype]};\n#define NAME "{op}"\n'
    text = Path(__file__).with_name(f"{name}.cpp").read_text()
    # Of no use to those who compile nothing, so the package does not wait for it.
    from torch._inductor.codecache import CppCodeCache  # noqa: PLC0415

    try:
        CppCodeCache.load(head + text, device_type="cpu")
    except (RuntimeError, OSError, ImportError) as error:  # of Inductor: no compiler, or no place for what it makes
        reason = first_line(error)
        logger.warning("PyTorch's own operations do what %s.cpp does, which cannot be compiled: %s", name, reason)
        return None
    return op
