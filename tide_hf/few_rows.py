"""Products of a few rows with weights as a model stores them: C++ that Inductor's compiler builds for this CPU.

A verify pass over a few tokens reads every weight once and computes little. oneDNN starts each product anew (12 us,
120 products a pass in a model of 30 layers) and wants a copy of the weights in its own layout. This product reads the
stored ones in the order in which they stand, for all rows at once. It adds up in the same order whatever the number of
rows is, so a pass over several tokens rounds as passes over one do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.codecache import CppPythonBindingsCodeCache

from .errors import first_line

MOST_ROWS = 8
LEAST_PER_THREAD = 32768  # multiplications; for fewer, waiting for another thread takes longer
VALUES = {torch.float32: "float", torch.bfloat16: "at::BFloat16"}
SOURCE = Path(__file__).with_suffix(".cpp")

Product = Callable[[Tensor, list[Tensor], Tensor, Tensor, "Tensor | None", Tensor], None]

logger = logging.getLogger(__name__)


@lru_cache
def product_of(dtype: torch.dtype) -> Product | None:
    """What multiplies values of a dtype, compiled when it is first asked for and kept on disk.

    Returns:
        Takes the input (..., in), weights (out, in) each, their addresses and their numbers of rows as int64 tensors, a
        bias (sum of out,) or `None`, and the output (..., sum of out), which it fills; at most `MOST_ROWS` rows.
        `None` for other dtypes and where nothing can be compiled.
    """
    if dtype not in VALUES:
        return None
    try:
        kernel = compiled(dtype)
    except (RuntimeError, OSError, ImportError) as error:  # of Inductor: no compiler, or no place for what it makes
        logger.warning("products of few rows are PyTorch's own, since C++ cannot be compiled: %s", first_line(error))
        return None

    def multiply(
        input: Tensor, weights: list[Tensor], places: Tensor, sizes: Tensor, bias: Tensor | None, output: Tensor
    ) -> None:
        input = input.contiguous()
        size = input.shape[-1]
        threads = min(torch.get_num_threads(), 1 + output.numel() * size // LEAST_PER_THREAD)
        given = input if bias is None else bias
        kernel(
            input, places, sizes, given, output, bias is not None, input.numel() // size, size, len(weights), threads
        )

    return multiply


def compiled(dtype: torch.dtype, **options: Any) -> Callable[..., None]:
    """The C++ function for a dtype, as `few_rows.cpp` declares it.

    Args:
        dtype: One of `VALUES`.
        **options: For Inductor's compiler.
    """
    value = VALUES[dtype]
    arguments = [
        f"const {value}*",
        "const int64_t*",
        "const int64_t*",
        f"const {value}*",
        f"{value}*",
        *["int64_t"] * 5,
    ]
    source = f"#include <c10/util/BFloat16.h>\nusing Value = {value};\n{SOURCE.read_text()}"
    return CppPythonBindingsCodeCache.load_pybinding(arguments, source, **options)
