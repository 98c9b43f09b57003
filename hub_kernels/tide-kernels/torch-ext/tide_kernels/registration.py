"""Registration of ops: their schemas and Triton implementations. A CUDA build adds its own under the CUDA key."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ._ops import add_op_namespace_prefix, ops

_NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")  # its ops live as long as it does
_NAMES: list[str] = []


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an op and return what to call.

    Args:
        schema: Its schema, without a namespace.
        implementation: The Triton implementation.
        fake: Returns empty results, for `torch.compile`.
    """
    name = schema.partition("(")[0]
    _NAMES.append(name)
    if not hasattr(ops, name):  # else the same build was loaded from another folder
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(add_op_namespace_prefix(name), fake, lib=_LIBRARY)
    return getattr(ops, name).default


def implementations() -> dict[str, str]:
    """What runs on a CUDA GPU, by op: `"cuda"` (compiled ahead) or `"triton"`."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name: "cuda" if has_kernel(add_op_namespace_prefix(name), "CUDA") else "triton" for name in _NAMES}


def on_device_of(tensor: torch.Tensor) -> Any:
    """A context in which Triton launches on the GPU that holds `tensor`."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def require(condition: bool, op: str, got: str, expected: str) -> None:
    """Refuse arguments that would make a kernel read or write beyond its tensors.

    Raises:
        ValueError: `condition` does not hold.
    """
    if not condition:
        raise ValueError(f"{op}: got {got}. Expected {expected}.")


def require_indices(op: str, indices: torch.Tensor, limit: torch.Tensor | None) -> None:
    """Refuse indices and a limit of other dtypes than the kernel reads."""
    dtypes = (indices.dtype, torch.int32 if limit is None else limit.dtype)
    require(dtypes == (torch.int64, torch.int32), op, f"{dtypes[0]} and {dtypes[1]}", "int64 indices, an int32 limit")


def nothing(*_args: object) -> None:
    """The fake of an op that only writes to its arguments."""


def require_rows(op: str, rows: torch.Tensor, per_row: torch.Tensor) -> None:
    """Refuse anything but rows (N, D) and one value for each of them."""
    fits = rows.dim() == 2 and per_row.shape == rows.shape[:1]
    require(fits, op, f"shapes {tuple(rows.shape)} and {tuple(per_row.shape)}", "(N, D) and (N,)")
