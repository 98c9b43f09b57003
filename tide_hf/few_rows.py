"""Products of a few rows with weights as a model stores them: C++ compiled for this CPU.

A verify pass over a few tokens reads every weight once and computes little. oneDNN starts each product anew (12 us,
120 products a pass in a model of 30 layers) and wants a copy of the weights in its own layout. This product reads the
stored ones in the order in which they stand, for all rows at once. It adds up in the same order whatever the number of
rows is, so a pass over several tokens rounds as passes over one do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cpu_kernels import load_kernel

MOST_ROWS = 8
LEAST_PER_THREAD = 32768  # multiplications; for fewer, waiting for another thread takes longer
ARGUMENTS = ("const Value*", "const int64_t*", "const int64_t*", "const Value*", "Value*", *["int64_t"] * 5)

Product = Callable[[Tensor, Tensor, Tensor, "Tensor | None", Tensor], None]


def product_of(dtype: torch.dtype) -> Product | None:
    """What multiplies values of a dtype.

    Returns:
        Takes the input (..., in), addresses of weights (out, in) and their numbers of rows as int64 tensors, a bias
        (sum of out,) or `None`, and the output (..., sum of out), which it fills; at most `MOST_ROWS` rows.
        `None` where there is no kernel.
    """
    kernel = load_kernel("few_rows", dtype, ARGUMENTS)
    if kernel is None:
        return None

    def multiply(input: Tensor, places: Tensor, sizes: Tensor, bias: Tensor | None, output: Tensor) -> None:
        input = input.contiguous()
        size = input.shape[-1]
        threads = min(torch.get_num_threads(), 1 + output.numel() * size // LEAST_PER_THREAD)
        given = input if bias is None else bias
        rows = input.numel() // size
        kernel(input, places, sizes, given, output, bias is not None, rows, size, len(places), threads)

    return multiply
