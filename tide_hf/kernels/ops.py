"""The fused kernels of `hub_kernels/tide-kernels` that a model runs.

[`Ops`] holds the loaded kernels of one model. Callers check `run_on` before they call a kernel, and otherwise run their
own plain PyTorch path. `reference` implements each op in plain PyTorch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ..common.choices import check_choice
from ..common.errors import KernelError, describe
from .loader import LoadedKernels, fetch, obstacle

KERNELS_REPO = "tide-hf/tide-kernels"
# Commit of the published kernels. Branches and tags can move, so without a pinned commit nothing is fetched.
KERNELS_REVISION: str | None = None
USE_KERNELS = (True, False, "auto")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("norm_route", "exit_compact", "exit_scatter", "kv_compact", "draft_top1", "accept_drafts")

logger = logging.getLogger(__name__)
_logged: set[str] = set()


class Ops:
    """The kernels of one model, if any.

    Args:
        kernels: The kernels; `None` for plain PyTorch.
        reason: Why kernels or plain PyTorch are used.
        request: Arguments of [`load_kernels`] with which an unpickled copy of the model loads its own.

    Attributes:
        kernels: The kernels; `None` for plain PyTorch.
        reason: Why kernels or plain PyTorch are used.
    """

    def __init__(self, kernels: LoadedKernels | None, reason: str, request: tuple[Any, ...] = ()) -> None:
        self.kernels = kernels
        self.reason = reason
        self._request = request

    def run_on(self, *tensors: Tensor | None) -> bool:
        """Whether the kernels support these tensors: all on one GPU, the first in a supported dtype."""
        if self.kernels is None or tensors[0] is None or tensors[0].dtype not in KERNEL_DTYPES:
            return False
        device = tensors[0].device
        fits = all(tensor is None or tensor.device == device for tensor in tensors)
        return fits and (device.type == "cuda" or self.kernels.variant == "torch-cpu")

    def __getattr__(self, name: str) -> Any:
        """The kernel of that name. Check [`run_on`] first."""
        if name not in OPS or self.kernels is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.kernels.module, name)

    def implementations(self) -> dict[str, str]:
        """The backend of each op: `"cuda"`, `"triton"` or `"torch"`."""
        known = self.kernels.implementations if self.kernels is not None else {}
        return {name: known.get(name, "torch") for name in OPS}

    def __deepcopy__(self, memo: dict[int, Any]) -> Ops:
        return self

    def __reduce__(self) -> tuple:
        """Pickle the request alone, since whether kernels can be loaded depends on the machine."""
        return _reload, self._request


PLAIN = Ops(None, "use_kernels=False")


def load_kernels(
    repo: str = KERNELS_REPO,
    revision: str | None = None,
    use_kernels: bool | str = "auto",
    device: torch.device | str | None = None,
) -> Ops:
    """Load the kernels for a model, or choose plain PyTorch. The choice and its reason are logged once.

    The environment variable `LOCAL_KERNELS="org/name=folder"` loads them from a folder instead of the Hub.

    Args:
        repo: Hub repository of the kernels, the only one that is trusted.
        revision: Its commit, 40 hexadecimal digits; default: the one that this version of tide_hf was tested with.
        use_kernels: `"auto"`: on an NVIDIA GPU from Turing on, if the kernels can be loaded. `True`: raise if they
            cannot. `False`: plain PyTorch.
        device: The model's device; default: the GPU, if there is one.

    Returns:
        The kernels, or none.

    Raises:
        ConfigurationError: `use_kernels` has another value.
        KernelError: `use_kernels=True`, and the kernels cannot be loaded.
    """
    if check_choice("use_kernels", use_kernels, USE_KERNELS) is False:
        return PLAIN
    if revision is None and repo == KERNELS_REPO:
        revision = KERNELS_REVISION
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    request = (repo, revision, device)
    found: LoadedKernels | str | None = obstacle(device, in_interpreter=use_kernels is True)
    if found is None:
        found = fetch(repo, revision)
    if isinstance(found, LoadedKernels):
        _log_once(f"fused kernels: {repo}, build {found.variant}, on {device}")
        return Ops(found, f"{repo}, build {found.variant}", request)
    if use_kernels is True:
        raise KernelError(
            describe(
                "fused kernels cannot be used",
                got=found,
                expected="an NVIDIA GPU of compute capability 7.5 or later and a build of the kernels for it",
                do="Pass use_kernels='auto' to fall back to plain PyTorch.",
            )
        )
    _log_once(f"plain PyTorch, no fused kernels: {found}")
    return Ops(None, found, request)


def kernel_facts(ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Describe the ops of a model on `device` in `dtype`, ready for JSON.

    Returns:
        `gpu` (its name, or `None`), `dtype`, `variant` (the build of the kernels, or `None`), `reason`, and `ops`: by
        name, `"cuda"`, `"triton"` or `"torch"`.
    """
    fits = dtype in KERNEL_DTYPES
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": str(dtype).removeprefix("torch."),
        "variant": ops.kernels.variant if ops.kernels is not None and fits else None,
        "reason": ops.reason if fits else f"there are no kernels for {dtype}",
        "ops": ops.implementations() if fits else dict.fromkeys(OPS, "torch"),
    }


def _reload(*request: Any) -> Ops:
    return load_kernels(request[0], request[1], "auto", request[2]) if request else PLAIN


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.info(message)
