"""Kernels in C++ that Inductor's compiler builds for this CPU when they are first asked for, and keeps on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from .errors import first_line

VALUES = {torch.float32: "float", torch.bfloat16: "at::BFloat16"}

logger = logging.getLogger(__name__)


@lru_cache
def load_kernel(name: str, dtype: torch.dtype, arguments: tuple[str, ...]) -> Callable[..., None] | None:
    """The function `kernel` of a file in this folder.

    Args:
        name: Of the file, without its ending.
        dtype: Of its values.
        arguments: Their types in C++; `Value` is the dtype.

    Returns:
        Takes tensors and numbers; `None` for other dtypes than `VALUES` has, and where nothing can be compiled.
    """
    if dtype not in VALUES:
        return None
    value = VALUES[dtype]
    text = Path(__file__).with_name(f"{name}.cpp").read_text()
    # Of no use to those who compile nothing, so the package does not wait for it.
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # noqa: PLC0415

    try:
        return CppPythonBindingsCodeCache.load_pybinding(
            [argument.replace("Value", value) for argument in arguments],
            f"#include <c10/util/BFloat16.h>\nusing Value = {value};\n{text}",
        )
    except (RuntimeError, OSError, ImportError) as error:  # of Inductor: no compiler, or no place for what it makes
        reason = first_line(error)
        logger.warning("PyTorch's own operations do what %s.cpp does, which cannot be compiled: %s", name, reason)
        return None
