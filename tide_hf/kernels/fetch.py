"""How kernels are fetched from the Hub, or from a local folder, and verified before any of their code runs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub.errors import HTTPError  # from httpx or httpx2, depending on the version
from packaging.version import Version

KERNELS_REPO = "tide-hf/tide-kernels"
# Commit of the published kernels. Branches and tags can move, so without a pinned commit nothing is fetched.
KERNELS_REVISION: str | None = None
MIN_CLIENT = "0.17"  # first version of the package `kernels` in which every call has `trust_remote_code`
DIGEST = "sha256"


def fetch(repo: str, revision: str | None, device_type: str) -> ModuleType | str:
    """Load this machine's build for `"cpu"` or `"cuda"` from the folder in `LOCAL_KERNELS` or from the Hub.

    Returns the reason instead if that fails.
    """
    if revision is None and repo == KERNELS_REPO:
        revision = KERNELS_REVISION
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
            check_files(kernels.install_kernel(repo, revision=revision, backend=device_type, trust_remote_code=[repo]))
        # Only this repository is trusted, not its dependencies.
        with sources_alone():
            module: ModuleType = kernels.get_kernel(
                repo, revision=revision or "local", backend=device_type, trust_remote_code=[repo]
            )
        return module
    except (AttributeError, HTTPError, ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{repo} cannot be loaded: {str(error).strip() or type(error).__name__}"


def variant_of(kernels: ModuleType) -> str:
    """The name of a build, such as torch-cuda or torch-stable-abi210-cpu-x86_64-linux."""
    return Path(str(kernels.__file__)).parent.name


@contextmanager
def sources_alone() -> Iterator[None]:
    """Context for importing a build: bytecode is neither read nor written, since `metadata.json` cannot list it."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    sys.pycache_prefix, sys.dont_write_bytecode = os.devnull, True  # a folder of bytecode that nobody can create
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def check_files(variant: Path) -> None:
    """Verify a build's checksums before any of its code runs; raise `ValueError` if a file does not match.

    Bytecode is left out: import the build in [`sources_alone`].
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
