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


def nothing(*_args: object) -> None:
    """The fake of an op that only writes to its arguments."""
