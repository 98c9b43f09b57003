"""The fused GPU kernels of `hub_kernels/tide-kernels`: whether a model can run them, and how they are loaded.

[`Ops`] holds the kernels of one model. Callers check `run_on` before they call a kernel, and otherwise run their own
plain PyTorch path. `reference` implements each op in plain PyTorch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub.errors import HTTPError  # from httpx or httpx2, depending on the version
from packaging.version import Version
from torch import Tensor

from ..common.choices import check_choice
from ..common.errors import KernelError

KERNELS_REPO = "tide-hf/tide-kernels"
# Commit of the published kernels. Branches and tags can move, so without a pinned commit nothing is fetched.
KERNELS_REVISION: str | None = None
USE_KERNELS = (True, False, "auto")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("norm_route", "exit_compact", "exit_scatter", "kv_compact", "draft_top1")
MIN_CAPABILITY = (7, 5)  # Turing
MIN_CLIENT = "0.17"  # first version of the package `kernels` in which every call has `trust_remote_code`
DIGEST = "sha256"

logger = logging.getLogger(__name__)


class Ops:
    """The kernels of one model, or `None` for plain PyTorch, and the reason for that choice."""

    def __init__(self, kernels: ModuleType | None, reason: str, request: tuple[Any, ...] = ()) -> None:
        self.kernels = kernels
        self.reason = reason
        self.variant = None if kernels is None else Path(str(kernels.__file__)).parent.name  # such as torch-cuda
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
        return (load_kernels, self._request) if self._request else "PLAIN"


PLAIN = Ops(None, "use_kernels=False")


def load_kernels(
    repo: str = KERNELS_REPO,
    revision: str | None = None,
    use_kernels: bool | str = "auto",
    device: torch.device | str | None = None,
) -> Ops:
    """Load the kernels for a model, or choose plain PyTorch. The choice and its reason are logged once.

    With the environment variable `LOCAL_KERNELS="org/name=folder"`, they come from a folder instead of the Hub.

    Args:
        repo: Hub repository of the kernels, the only one that is trusted.
        revision: Commit of `repo`, 40 hexadecimal digits; default: the commit that this tide_hf was tested with.
        use_kernels: `"auto"`: use kernels on NVIDIA GPUs from Turing on, if they can be loaded. `True`: raise if they
            cannot be used. `False`: use plain PyTorch.
        device: The model's device; default: the GPU, if there is one.

    Raises:
        ConfigurationError: `use_kernels` has another value.
        KernelError: `use_kernels=True`, and the kernels cannot be loaded.
    """
    if check_choice("use_kernels", use_kernels, USE_KERNELS) is False:
        return PLAIN
    if revision is None and repo == KERNELS_REPO:
        revision = KERNELS_REVISION
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    request = (repo, revision, "auto", device)
    found: ModuleType | str = _obstacle(device, in_interpreter=use_kernels is True) or _fetch(repo, revision)
    if isinstance(found, ModuleType):
        ops = Ops(found, "", request)
        ops.reason = f"{repo}, build {ops.variant}"
        _log_once(f"fused kernels: {ops.reason}, on {device}")
        return ops
    if use_kernels is True:
        raise KernelError(
            "fused kernels cannot be used",
            got=found,
            expected="an NVIDIA GPU of compute capability 7.5 or later and a build of the kernels for it",
            do="Pass use_kernels='auto' to fall back to plain PyTorch.",
        )
    _log_once(f"plain PyTorch, no fused kernels: {found}")
    return Ops(None, found, request)


def kernel_facts(ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Describe the ops of a model on `device` in `dtype`, ready for JSON."""
    fits = dtype in KERNEL_DTYPES
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": str(dtype).removeprefix("torch."),
        "variant": ops.variant if fits else None,
        "reason": ops.reason if fits else f"there are no kernels for {dtype}",
        "ops": ops.implementations() if fits else dict.fromkeys(OPS, "torch"),
    }


def _obstacle(device: torch.device, in_interpreter: bool) -> str | None:
    """The reason why the kernels cannot run on `device`, or `None`."""
    # Triton's interpreter runs kernels on a CPU, slowly, for tests.
    if device.type == "cpu" and in_interpreter and os.environ.get("TRITON_INTERPRET") == "1":
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


def _fetch(repo: str, revision: str | None) -> ModuleType | str:
    """Load this machine's build from the folder in `LOCAL_KERNELS` or from the Hub, or return why that fails."""
    try:
        kernels: Any = import_module("kernels")
    except ImportError:
        return "the package kernels is not installed (pip install 'tide-hf[kernels]')"
    try:
        if Version(found := version("kernels")) < Version(MIN_CLIENT):
            needed = f"{MIN_CLIENT} or later is needed (pip install -U 'tide-hf[kernels]')"
            return f"the package kernels is {found}, and {needed}"
        local = _local_folder(repo)
        if local is not None:
            for pattern in ("metadata.json", "*/metadata.json", "build/*/*.json"):
                for metadata in local.glob(pattern):
                    check_files(metadata.parent)
        elif revision is None:
            return f"no kernels are published yet, and LOCAL_KERNELS does not name a folder for {repo}"
        elif not re.fullmatch(r"[0-9a-f]{40}", revision):
            return f"revision {revision!r} is no commit (40 hexadecimal digits), and other names can change"
        else:
            check_files(kernels.install_kernel(repo, revision=revision, trust_remote_code=[repo]))
        # Only this repository is trusted, not its dependencies.
        module: ModuleType = kernels.get_kernel(repo, revision=revision or "local", trust_remote_code=[repo])
        return module
    except (AttributeError, HTTPError, ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{repo} cannot be loaded: {str(error).strip() or type(error).__name__}"


def check_files(variant: Path) -> None:
    """Verify a build's checksums before any of its code runs; raise `ValueError` if a file does not match."""
    path = variant / "metadata.json"
    try:
        digest = json.loads(path.read_text())["digest"]
        algorithm, listed = digest["algorithm"], dict(digest["files"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read, or lists no files ({error!r})") from error
    if algorithm != DIGEST:
        raise ValueError(f"{path} lists files by {algorithm!r}, and not by {DIGEST}")
    present = {
        file.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in variant.rglob("*")
        if file.is_file() and file.parent.name != "__pycache__" and not file.name.startswith("metadata.json")
    }
    wrong = sorted(name for name in {*listed, *present} if listed.get(name) != present.get(name))
    if wrong:
        raise ValueError(f"{', '.join(wrong)} in {variant} is not what metadata.json lists")


def _local_folder(repo: str) -> Path | None:
    entries = (entry.split("=", 1) for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if "=" in entry)
    folder = dict(entries).get(repo)
    return None if folder is None else Path(folder)


@cache
def _log_once(message: str) -> None:
    logger.info(message)
