"""What a function does with tensors, in a form in which two of them can be compared, without tracing either."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class OperationLog(TorchDispatchMode):
    """Notes the operations of what runs within, and of each the arguments: tensors by where they come from.

    Two functions that have equal logs over inputs of the same shapes do the same with them and with their constants,
    the first of the one being the first of the other.

    Args:
        inputs: What the function is called with.

    Attributes:
        constants: Tensors that were neither passed nor made, in the order in which they are first used.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.constants: list[Tensor] = []
        self._entries: list[tuple[Any, str]] = []
        self._seen = list(inputs)  # kept, lest an address be that of another tensor later
        self._names = {id(tensor): f"input {number} {_form(tensor)}" for number, tensor in enumerate(inputs)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note an operation, and do it."""
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
        """Like PyTorch's own modes that trace, it is none of a user's who counts operations."""
        return True

    @property
    def key(self) -> tuple[tuple[Any, str], ...]:
        """The operations; equal where two functions do the same."""
        return tuple(self._entries)

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"constant {len(self.constants)} {_form(tensor)}"
            self.constants.append(tensor)
            self._seen.append(tensor)
        return self._names[id(tensor)]


def _form(tensor: Tensor) -> str:
    laid_out = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return f"{tuple(tensor.shape)} {laid_out} {tensor.dtype}"
