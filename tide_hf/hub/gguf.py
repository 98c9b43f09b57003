"""Dequantised copies of GGUF files, kept in the cache folder, since transformers takes half a minute to read a file."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
from transformers.utils import cached_file, is_gguf_available

from ..common.errors import MissingPackageError
from ..common.files import cache_folder, is_private_folder
from ..routers.config import WHERE

READER = "gguf==0.19.0"
LARGEST = 2**30  # bytes of a file whose copy is kept; a copy of a 4-bit file takes up to eight times as many

logger = logging.getLogger(__name__)


def use_copy(name: str | os.PathLike[str], options: dict[str, Any]) -> tuple[str | os.PathLike[str], dict[str, Any]]:
    """Replace the GGUF file in arguments of `from_pretrained` by its copy, which is made at the first use.

    Copies are named after the file's content and the version of transformers. Files above `LARGEST`, and all files
    where no copy can be kept, are left to transformers; the log says why.
    """
    if options.get("gguf_file") is None:
        return name, options
    check_reader()
    where = {option: options[option] for option in WHERE if option in options}
    file = Path(str(cached_file(os.fspath(name), options["gguf_file"], **where)))
    if file.stat().st_size > LARGEST:
        logger.info("no copy of %s is kept: it has over %d MB", file.name, LARGEST >> 20)
        return name, options
    copy = cache_folder() / f"gguf-{hashlib.sha256(file.read_bytes()).hexdigest()}-{__version__}"
    try:
        made_once(copy, lambda staging: convert_gguf(file, staging))
    except (OSError, SafetensorError) as error:  # such as a full disk
        logger.info("no copy of %s is kept: %s", file.name, error)
        return name, options
    if not is_private_folder(copy):
        logger.info("the copy of %s is not used: others can write to %s", file.name, copy)
        return name, options
    return copy, {option: value for option, value in options.items() if option not in ("gguf_file", *WHERE)}


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Have `make` write a folder, unless it is there; killed runs and other processes leave no unfinished one."""
    home = folder.parent
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / "converting.lock"):
        if not folder.is_dir():
            for abandoned in home.glob(".converting-*"):  # left by killed runs: a live one would hold the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=home, prefix=".converting-") as staging:
                made = Path(staging) / "model"
                made.mkdir(mode=0o700)
                make(made)
                os.replace(made, folder)


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file to a folder, in float32."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are dequantised, but the model is still marked as quantised and refuses to be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def check_reader() -> None:
    """Raise [`MissingPackageError`] if GGUF files cannot be read."""
    if not is_gguf_available():
        raise MissingPackageError(
            "GGUF files cannot be read",
            got="no package gguf",
            expected=READER,
            do=f"Install it: pip install {READER}.",
        )
