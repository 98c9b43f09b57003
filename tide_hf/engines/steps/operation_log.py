"""A log of a function's tensor operations, with which functions are compared without tracing them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class OperationLog(TorchDispatchMode):
    """Records each operation with its arguments, where tensors are named by their origin.

    Two functions with equal logs over inputs of the same shapes compute the same from their inputs and constants, where
    the constants correspond in order.

    Args:
        inputs: The inputs of the function.

    Attributes:
        constants: Tensors that are neither inputs nor results, in order of first use.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.constants: list[Tensor] = []
        self._entries: list[tuple[Any, str]] = []
        self._seen = list(inputs)  # kept alive, so that ids stay unique
        self._names = {id(tensor): f"input {number} {_describe(tensor)}" for number, tensor in enumerate(inputs)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operation and run it."""
        kwargs = kwargs or {}
        self._entries.append((func, str(tree_map_only(Tensor, self._name, (args, kwargs)))))
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in self._names:
                self._names[id(tensor)] = f"result {len(self._names)}"
                self._seen.append(tensor)
        return result

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Count as one of PyTorch's own tracing modes, not as a user's mode."""
        return True

    @property
    def key(self) -> tuple[tuple[Any, str], ...]:
        """The operations; equal for functions that compute the same."""
        return tuple(self._entries)

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"constant {len(self.constants)} {_describe(tensor)}"
            self.constants.append(tensor)
            self._seen.append(tensor)
        return self._names[id(tensor)]


def _describe(tensor: Tensor) -> str:
    laid_out = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return f"{tuple(tensor.shape)} {laid_out} {tensor.dtype}"
