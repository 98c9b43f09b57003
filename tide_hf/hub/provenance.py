"""Provenance of measured figures: date, model, machine, versions, command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..base_model.structure import input_device
from ..common.measurements import cpu_name
from ..common.version import __version__

PACKAGES = ("transformers", "accelerate", "huggingface-hub", "safetensors")


def provenance(model: Any) -> dict[str, Any]:
    """Date, model, machine and versions of a measurement, ready for JSON."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": without_folders(model.config._name_or_path),
        "revision": getattr(model.config, "_commit_hash", None),
        "weights_origin": getattr(model, "weights_origin", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        **machine(input_device(model)),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": commit(),
        "versions": {"tide-hf": __version__, "torch": torch.__version__}
        | {name: metadata.version(name) for name in PACKAGES},
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Device, CPU and thread count."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "cpu": cpu_name(), "torch_threads": torch.get_num_threads()}


def command_line(argv: Sequence[str]) -> str:
    """The command line in a form that can be published: local paths are reduced to their last part."""
    return f"tide-hf {shlex.join(map(without_folders, argv))}"


def without_folders(word: str) -> str:
    """Reduce a local path in a word of a command line to its last part."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    path = Path(value)
    is_place = path.is_absolute() or path.parts[:1] in (("~",), ("..",)) or (len(path.parts) > 1 and path.exists())
    return f"{option}{equals}{path.name}" if is_place else word


def commit(file: Path = Path(__file__)) -> str | None:
    """The git commit of the source tree of `file`; `None` outside a repository, such as after installing a wheel.

    The commit must contain the file, since an environment may be inside an unrelated repository.
    """
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(file.parent), "rev-parse", "HEAD", f"HEAD:./{file.name}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.split()[0] if result.returncode == 0 else None
