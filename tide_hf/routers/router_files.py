"""Files of routers that cannot be used: how they are told, and the reader of the published system's file."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from ..errors import RoutersFileError, RoutersNotFoundError, RoutersNotSavedError, TIDEError, describe, quoted

STAGING = ".saving-"  # what the folders are called that saves write to

# What reading a damaged file by torch, pickle and zipfile fails with.
DAMAGE = (
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


@contextmanager
def explained(name_or_path: str | os.PathLike[str]) -> Iterator[None]:
    """Tell what loading from `name_or_path` fails with as errors of this library.

    Raises:
        RoutersNotFoundError: There are no routers, or they cannot be had.
        RoutersFileError: There are, and they cannot be used.
    """
    try:
        yield
    except TIDEError:
        raise
    except OSError as error:
        raise routers_not_found(name_or_path, quoted(error)) from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise RoutersFileError(file_problem(name_or_path, quoted(error))) from error


def routers_not_saved(folder: Path, got: str) -> RoutersNotSavedError:
    """An error about a folder that takes no file."""
    return RoutersNotSavedError(
        describe(
            f"the routers could not be written to {folder}",
            got=got,
            expected="a folder with room for them",
            do="Make room or save them elsewhere; what was there before is still there.",
        )
    )


def routers_not_found(name_or_path: str | os.PathLike[str], got: str) -> RoutersNotFoundError:
    """An error about routers that are not there, or out of reach."""
    return RoutersNotFoundError(
        describe(
            f"no routers at {name_or_path}",
            got=got,
            expected="config.json and model.safetensors, as TIDERouters.save_pretrained writes them",
            do="Check the name and the network, or make routers with tide_hf.calibrate().",
        )
    )


def refuse_shards(name_or_path: str | os.PathLike[str], subfolder: str = "") -> None:
    """Refuse a local folder whose weights an index points to: routers are one file, and an index may point anywhere.

    Raises:
        RoutersFileError: There is an index.
    """
    for index in Path(name_or_path, subfolder).glob("*.index.json"):
        raise RoutersFileError(file_problem(name_or_path, f"{index.name}, which points to other files"))


def finish_save(folder: str | os.PathLike[str]) -> None:
    """Put the config of a save in its place that was killed when its weights were in theirs.

    The config goes last. Where it never went, it still lies in the folder that the save wrote to.

    Args:
        folder: Of routers; anything else stays as it is.
    """
    weights, config = Path(folder, SAFE_WEIGHTS_NAME), Path(folder, CONFIG_NAME)
    for left in Path(folder).glob(f"{STAGING}*/{CONFIG_NAME}"):
        try:
            digest = weights_digest(weights)
            if _weights_of(left) == digest != _weights_of(config):
                copy = left.with_suffix(".copy")
                shutil.copy(left, copy)
                os.replace(copy, config)
        except (OSError, ValueError):  # a save that goes on, or a folder that takes no file: what is there is checked
            continue


def _weights_of(config: Path) -> str | None:
    """What a config says of its weights."""
    said = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None
    return said.get("weights_sha256") if isinstance(said, dict) else None


def weights_digest(file: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def check_weights(name_or_path: str | os.PathLike[str], known: str | None, **options: Any) -> None:
    """Refuse weights that are not those that were saved with the config; safetensors has no checksum.

    Args:
        name_or_path: Folder or repository that the weights have just been read from.
        known: What the config says of them; `None` in files that earlier versions wrote.
        **options: Where they were read from: `cache_dir`, `revision`, `subfolder`, `token`.

    Raises:
        RoutersFileError: They are others.
    """
    if known is None:
        return
    file = cached_file(name_or_path, SAFE_WEIGHTS_NAME, local_files_only=True, **options)
    found = weights_digest(file)
    if found != known:
        raise RoutersFileError(
            file_problem(name_or_path, f"weights with SHA-256 {found[:12]}... where config.json says {known[:12]}...")
        )


def read_router_pt(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a published `router.pt`, read so that code inside it cannot run."""
    if not Path(path).is_file():
        raise RoutersNotFoundError(
            describe("no such file", got=path, expected="a router.pt of tide-inference", do="Check the path.")
        )
    try:
        damaged = _damaged_part(path)
        state = torch.load(path, map_location="cpu", weights_only=True) if damaged is None else None
    except DAMAGE as error:
        raise bad_router_pt(path, quoted(error)) from error
    if damaged is not None:
        raise bad_router_pt(path, f"a file whose part {damaged} is damaged")
    if not isinstance(state, dict):
        raise bad_router_pt(path, type(state).__name__)
    return state


def _damaged_part(path: str | os.PathLike[str]) -> str | None:
    """The first part of a file of `torch.save` that its checksum does not fit; torch itself does not look."""
    if not zipfile.is_zipfile(path):  # torch's older form has no checksums
        return None
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def copy_published(path: str | os.PathLike[str], linear: nn.Linear, weights: Any, name: str) -> None:
    """Copy the published weight `name` into a layer of ours, whose bias becomes 0."""
    weight = weights.get(name) if isinstance(weights, dict) else None
    if not isinstance(weight, Tensor) or weight.shape != linear.weight.shape:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else None
        raise bad_router_pt(path, f"{name} of shape {shape} where {tuple(linear.weight.shape)} fits the base model")
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.zero_()


def bad_router_pt(path: str | os.PathLike[str], got: str) -> RoutersFileError:
    """An error about a published `router.pt`."""
    return RoutersFileError(
        describe(
            f"{path} cannot be used as a published router.pt",
            got=got,
            expected="hidden_dim, bottleneck_dim and router_layers of tensors, as tide-inference saves them",
            do="Save it again with tide-inference, or calibrate afresh with tide_hf.calibrate().",
        )
    )


def file_problem(path: str | os.PathLike[str], got: str) -> str:
    """The message of an error about files of routers."""
    return describe(
        f"the routers at {path} cannot be used",
        got=got,
        expected="the config and tensors that TIDERouters.save_pretrained writes",
        do="Download them again, or make new ones with tide_hf.calibrate().",
    )
