"""Whether a model runs the fused kernels of `hub_kernels/tide-kernels`, and how they are loaded.

[`Ops`] holds the kernels of one model, where they were loaded. Callers ask `run_on` before they call one, and have a
plain path of their own for where it says no. `reference` has each op in plain PyTorch.
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
# Commit of the published kernels. A name alone is nothing to run code from, so without it nothing is fetched.
KERNELS_REVISION: str | None = None
USE_KERNELS = (True, False, "auto")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("norm_route", "exit_compact", "exit_scatter", "kv_compact", "draft_top1", "accept_drafts")

logger = logging.getLogger(__name__)
_logged: set[str] = set()


class Ops:
    """The kernels that one model runs, if any.

    Args:
        kernels: The kernels; `None` for plain PyTorch.
        reason: Why it is the one or the other.
        request: The arguments of [`load_kernels`] that led here, by which a copy of the model asks again.

    Attributes:
        kernels: As above.
        reason: As above.
    """

    def __init__(self, kernels: LoadedKernels | None, reason: str, request: tuple[Any, ...] = ()) -> None:
        self.kernels = kernels
        self.reason = reason
        self._request = request

    def run_on(self, *tensors: Tensor | None) -> bool:
        """Whether kernels take tensors like these: all on one GPU, the first in a dtype that they know."""
        if self.kernels is None or tensors[0] is None or tensors[0].dtype not in KERNEL_DTYPES:
            return False
        device = tensors[0].device
        fits = all(tensor is None or tensor.device == device for tensor in tensors)
        return fits and (device.type == "cuda" or self.kernels.variant == "torch-cpu")

    def __getattr__(self, name: str) -> Any:
        """The kernel of that name. Ask [`run_on`] first."""
        if name not in OPS or self.kernels is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.kernels.module, name)

    def implementations(self) -> dict[str, str]:
        """What runs, by op: `"cuda"`, `"triton"` or `"torch"`."""
        known = self.kernels.implementations if self.kernels is not None else {}
        return {name: known.get(name, "torch") for name in OPS}

    def __deepcopy__(self, memo: dict[int, Any]) -> Ops:
        return self

    def __reduce__(self) -> tuple:
        """Pickle the request: kernels are loaded, or not, where it is unpickled."""
        return _asked_again, self._request


PLAIN = Ops(None, "use_kernels=False")


def load_kernels(
    repo: str = KERNELS_REPO,
    revision: str | None = None,
    use_kernels: bool | str = "auto",
    device: torch.device | str | None = None,
) -> Ops:
    """Decide what a model runs, and load the kernels if it is them. The log says which, and why, once.

    `LOCAL_KERNELS="org/name=folder"` in the environment takes them from a folder instead of the Hub.

    Args:
        repo: Hub repository of the kernels, the only one whose code may run.
        revision: Its commit, 40 hexadecimal digits; default: the one that this version of tide_hf was tested with.
        use_kernels: `"auto"`: on an NVIDIA GPU from Turing on, where the kernels can be had. `True`: or fail.
            `False`: plain PyTorch.
        device: Where the model is; default: the GPU, if there is one.

    Returns:
        The kernels, or none.

    Raises:
        ConfigurationError: `use_kernels` is none of these.
        KernelError: `use_kernels=True`, and the kernels cannot be had. The message says why.
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
                do="Pass use_kernels='auto' for plain PyTorch where they cannot be had.",
            )
        )
    _log_once(f"plain PyTorch, no fused kernels: {found}")
    return Ops(None, found, request)


def kernel_facts(ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What runs for a model on `device` in `dtype`, ready for JSON.

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


def _asked_again(*request: Any) -> Ops:
    return load_kernels(request[0], request[1], "auto", request[2]) if request else PLAIN


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.info(message)
