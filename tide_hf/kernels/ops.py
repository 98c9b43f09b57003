"""The fused kernels of `hub_kernels/tide-kernels` for a model: whether it can run them, and which it gets.

[`Ops`] holds the GPU kernels of one model; on a CPU, `cpu.cpp_kernels` has those of all models. Callers check `run_on`
before they call a kernel, and otherwise run their own plain PyTorch path.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..common.choices import check_choice
from ..common.errors import KernelError
from .cpu.cpp_kernels import build_kernels, fetch_kernels, ready_kernels
from .fetch import KERNELS_REPO, fetch, variant_of

USE_KERNELS = (True, False, "auto")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("norm_route", "kv_compact", "draft_top1")
MIN_CAPABILITY = (7, 5)  # Turing

logger = logging.getLogger(__name__)


class Ops:
    """The kernels of one model, or `None` for plain PyTorch, and the reason for that choice."""

    def __init__(self, kernels: ModuleType | None, reason: str, request: tuple[Any, ...] = ()) -> None:
        self.kernels = kernels
        self.reason = reason
        self.variant = None if kernels is None else variant_of(kernels)
        self._request = request  # arguments with which an unpickled copy of the model loads its own kernels

    def run_on(self, *tensors: Tensor | None) -> bool:
        """Whether the kernels support these tensors: all on one GPU, the first in a supported dtype."""
        if self.kernels is None or tensors[0] is None or tensors[0].dtype not in KERNEL_DTYPES:
            return False
        device = tensors[0].device
        fits = all(tensor is None or tensor.device == device for tensor in tensors)
        return fits and (device.type == "cuda" or self.variant == "torch-cpu")

    def __getattr__(self, name: str) -> Any:
        """The kernel of that name. Check [`run_on`] first."""
        if name not in OPS or self.kernels is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.kernels, name)

    def implementations(self) -> dict[str, str]:
        """The backend of each op: `"cuda"`, `"triton"` or `"torch"`."""
        known = {} if self.kernels is None else self.kernels.implementations()
        return {name: known.get(name, "torch") for name in OPS}

    def __deepcopy__(self, memo: dict[int, Any]) -> Ops:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle only the request, since whether kernels can be loaded depends on the machine."""
        return (load_kernels, self._request) if self._request else "WITHOUT_KERNELS"


WITHOUT_KERNELS = Ops(None, "use_kernels=False")


def load_kernels(
    repo: str = KERNELS_REPO,
    revision: str | None = None,
    use_kernels: bool | str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Ops:
    """Load the kernels for a model, or choose plain PyTorch. The choice and its reason are logged once.

    With the environment variable `LOCAL_KERNELS="org/name=folder"`, they come from a folder instead of the Hub.

    Args:
        repo: Hub repository of the kernels, the only one that is trusted.
        revision: Commit of `repo`, 40 hexadecimal digits; default: the commit that this tide_hf was tested with.
        use_kernels: `"auto"`: use kernels on NVIDIA GPUs from Turing on, and on CPUs, if they can be loaded. `True`:
            raise if they cannot be used; on a CPU, build them if they cannot be loaded. `False`: use plain PyTorch.
        device: The model's device; default: the GPU, if there is one.
        dtype: The model's dtype, for which kernels for the CPU are built.

    Raises:
        ConfigurationError: `use_kernels` has another value.
        KernelError: `use_kernels=True`, and the kernels cannot be loaded.
    """
    if check_choice("use_kernels", use_kernels, USE_KERNELS) is False:
        return WITHOUT_KERNELS
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    request = (repo, revision, "auto", device)
    if device.type == "cpu" and not (use_kernels is True and os.environ.get("TRITON_INTERPRET") == "1"):
        return _on_cpu(request, dtype, must_build=use_kernels is True)
    found: ModuleType | str = _obstacle(device) or fetch(repo, revision, device.type)
    if isinstance(found, ModuleType):
        ops = Ops(found, "", request)
        ops.reason = f"{repo}, build {ops.variant}"
        _log_once(f"fused kernels: {ops.reason}, on {device}")
        return ops
    if use_kernels is True:
        raise _refusal(found, "an NVIDIA GPU of compute capability 7.5 or later and a build of the kernels for it")
    _log_once(f"plain PyTorch, no fused kernels: {found}")
    return Ops(None, found, request)


def _on_cpu(request: tuple[Any, ...], dtype: torch.dtype, must_build: bool) -> Ops:
    """Load the C++ kernels, which all models on the CPU share; the ops for GPUs run as plain PyTorch."""
    reason = fetch_kernels(*request[:2])
    if reason is not None and must_build and not build_kernels(dtype):
        raise _refusal(f"{reason}, and they cannot be built", "a build of the kernels for this CPU, or a C++ compiler")
    where = "on the Hub or in LOCAL_KERNELS" if reason is None else f"not found ready-made ({reason})"
    _log_once(f"C++ kernels for this CPU: {where}")
    return Ops(None, f"{reason}; tide_warm_up() builds them" if reason else "", request)


def _refusal(got: str, expected: str) -> KernelError:
    do = "Pass use_kernels='auto' to fall back to plain PyTorch."
    return KernelError("fused kernels cannot be used", got=got, expected=expected, do=do)


def kernel_facts(ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Describe the ops of a model on `device` in `dtype`, ready for JSON."""
    fits = dtype in KERNEL_DTYPES
    variant, reason, backends = ops.variant, ops.reason, ops.implementations()
    if device.type == "cpu" and ops.kernels is None and (kernels := ready_kernels(dtype)) is not None:
        variant, reason, backends = variant_of(kernels), "", kernels.implementations()
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": str(dtype).removeprefix("torch."),
        "variant": variant if fits else None,
        "reason": reason if fits else f"there are no kernels for {dtype}",
        "ops": backends if fits else dict.fromkeys(OPS, "torch"),
    }


def _obstacle(device: torch.device) -> str | None:
    """The reason why the GPU kernels cannot run on `device`, or `None`."""
    if device.type == "cpu":  # Triton's interpreter runs kernels on a CPU, slowly, for tests
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the model is on {'an AMD GPU' if device.type == 'cuda' else device.type}, and they need an NVIDIA GPU"
    if (device.index or 0) >= torch.cuda.device_count():  # a model unpickled on another machine
        return f"PyTorch finds no {device} on this machine"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, MIN_CAPABILITY))
        return f"{name} has compute capability {'.'.join(map(str, capability))}, and they need {needed} or later"
    return None


@cache
def _log_once(message: str) -> None:
    logger.info(message)
