"""Load the fused GPU kernels with the `kernels` package, or report why they cannot be used."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub.errors import HTTPError  # the name in httpx has changed before
from packaging.version import Version

MIN_CAPABILITY = (7, 5)  # Turing
MIN_CLIENT = "0.17"  # the first in which every call takes the trusted repositories
DIGEST = "sha256"


@dataclass(frozen=True)
class LoadedKernels:
    """A loaded build of the kernels.

    Attributes:
        module: The kernel's module.
        variant: The build that was chosen, such as `torch-cuda`.
        implementations: The backend of each op, `"triton"` or `"cuda"`.
    """

    module: ModuleType
    variant: str
    implementations: dict[str, str]


def obstacle(device: torch.device, in_interpreter: bool) -> str | None:
    """The reason why the kernels cannot run on `device`, or `None`.

    Args:
        device: The model's device.
        in_interpreter: Whether Triton's interpreter counts, which runs kernels on a CPU, slowly, for tests.
    """
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


def fetch(repo: str, revision: str | None) -> LoadedKernels | str:
    """Load the build for this machine from the folder in `LOCAL_KERNELS`, or from the Hub.

    Args:
        repo: The kernel repository, the only trusted one: its dependencies are not.
        revision: The commit to fetch; not needed for a local folder.

    Returns:
        The kernels, or the reason why there are none.
    """
    try:
        kernels: Any = import_module("kernels")
    except ImportError:
        return "the package kernels is not installed (pip install 'tide-hf[kernels]')"
    try:
        if Version(found := version("kernels")) < Version(MIN_CLIENT):
            needed = f"{MIN_CLIENT} or later is needed (pip install -U 'tide-hf[kernels]')"
            return f"the package kernels is {found}, and {needed}"
        local = _local_folder(repo)
        if local is None:
            if revision is None:
                return f"no kernels are published yet, and LOCAL_KERNELS does not name a folder for {repo}"
            if not re.fullmatch(r"[0-9a-f]{40}", revision):
                return f"revision {revision!r} is no commit (40 hexadecimal digits), and other names can change"
            check_files(kernels.install_kernel(repo, revision=revision, trust_remote_code=[repo]))
        else:
            for metadata in [
                *local.glob("metadata.json"),
                *local.glob("*/metadata.json"),
                *local.glob("build/*/*.json"),
            ]:
                check_files(metadata.parent)
        module = kernels.get_kernel(repo, revision=revision or "local", trust_remote_code=[repo])
        return LoadedKernels(module, Path(str(module.__file__)).parent.name, module.implementations())
    except (AttributeError, HTTPError, ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{repo} cannot be loaded: {str(error).strip() or type(error).__name__}"


def check_files(variant: Path) -> None:
    """Verify the checksums of a build against its metadata, before any of its code runs.

    Raises:
        ValueError: A file does not match, or the metadata cannot be read.
    """
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
