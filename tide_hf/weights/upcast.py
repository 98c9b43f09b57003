"""Calls of a half-precision model that compute in float32: activations, K/V and sums. Its weights stay as they are.

On a CPU the bytes of the weights decide how fast a model decodes, so this costs next to nothing, and answers are those
of the same model loaded in float32. Linear layers multiply float32 inputs by their weights in half precision, or by
integers, through their gates (`linear_gate`). Here all other modules with parameters, such as norms and embeddings, run
their own forward on float32 copies of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..depth.gates import Gate
from .layouts import version_of

HALF = (torch.bfloat16, torch.float16)
KEPT_VALUES = 1 << 20  # of a parameter, up to which its copy is kept; a larger one is copied for each use

aten = torch.ops.aten
# What may return values in half precision: they are the weights' own.
LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default)

_upcasts: ContextVar[bool] = ContextVar("tide_hf_upcasts", default=False)


def upcasts() -> bool:
    """Whether models in half precision compute in float32 now."""
    return not torch.compiler.is_dynamo_compiling() and _upcasts.get()


@contextmanager
def upcasting(is_on: bool = True) -> Iterator[None]:
    """The context in which models in half precision compute in float32."""
    token = _upcasts.set(is_on)
    try:
        yield
    finally:
        _upcasts.reset(token)


def dtype_now(model: Any) -> torch.dtype:
    """The dtype in which a model computes now."""
    return torch.float32 if upcasts() else model.dtype


class UpcastGate(Gate):
    """Replaces the `forward` of a module that has parameters in half precision, and is no gated linear layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.copies: dict[str, tuple[tuple[int, int], Tensor]] = {}  # by parameter, its version and its copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward: within [`upcasting`], on float32 parameters."""
        if not upcasts():
            return self.native(*args, **kwargs)
        module: Any = self.module
        if not isinstance(module, nn.Embedding):
            return type(module).forward(self._with_parameters(map(self.float32, module._parameters)), *args, **kwargs)
        if not hasattr(module, "embed_scale"):
            return self.native(*args, **kwargs).float()
        ids = args[0] if args else next(iter(kwargs.values()))
        rows = nn.functional.embedding(ids.flatten(), module.weight).float()  # a copy of the table would take memory
        found = self._with_parameters([rows])
        found.padding_idx = None
        return type(module).forward(found, torch.arange(ids.numel(), device=ids.device).view(ids.shape))

    def float32(self, name: str) -> Any:
        """A parameter in float32, by name."""
        parameter = self.module._parameters[name]
        if type(parameter) is not nn.Parameter or parameter.dtype not in HALF:
            return parameter
        if parameter.numel() > KEPT_VALUES or parameter.is_inference():
            return parameter.detach().float()
        version = version_of(parameter)
        if name not in self.copies or self.copies[name][0] != version:
            with _disable_current_modes(), torch.inference_mode(False):  # no trace shall record it
                self.copies[name] = version, parameter.detach().float()
        return self.copies[name][1]

    def release(self) -> None:
        """Free the copies."""
        self.copies = {}

    def _with_parameters(self, values: Iterable[Any]) -> Any:
        """The module with other parameters; a module of its own, since other threads may run this one meanwhile."""
        module, found = self.module, object.__new__(type(self.module))
        found.__dict__.update(module.__dict__, _parameters=dict(zip(module._parameters, values, strict=True)))
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave the copies out of copies and pickles."""
        return {**self.__dict__, "copies": {}}


def modules_to_upcast(model: nn.Module, gated: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules of a model that have parameters in half precision, but for those in `gated`."""
    known = set(map(id, gated))
    modules = [module for module in model.modules() if id(module) not in known]
    return [module for module in modules if any(_is_half(one) for one in module._parameters.values())]


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF


class RoundingLog(TorchDispatchMode):
    """Notes the first operation that rounds to half precision."""

    found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        result = func(*args, **kwargs or {})
        if self.found is None and func not in LOOKUPS and any(map(_is_half, tree_leaves(result))):
            is_view = any(value.alias_info is not None for value in func._schema.returns)
            self.found = None if is_view else str(func)
        return result
