"""Files of routers: atomic saving, checked loading, and the reader of the published `router.pt`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from ..common.errors import RoutersFileError, RoutersNotFoundError, RoutersNotSavedError, TIDEError, describe, quoted
from ..common.files import remove_abandoned, write_all_whole
from .config import TIDEConfig, bad_config

# Metadata of the safetensors file.
OWN_CONFIG = "tide_config"
OWN_DIGEST = "tide_config_and_values_sha256"

logger = logging.getLogger(__name__)

# Errors of torch, pickle and zipfile on a damaged file.
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
    """Translate errors of loading from `name_or_path` into those of this library.

    Raises:
        RoutersNotFoundError: There are no routers, or they cannot be reached.
        RoutersFileError: The files cannot be used.
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
    """An error about a folder that cannot be written."""
    return RoutersNotSavedError(
        describe(
            f"the routers could not be written to {folder}",
            got=got,
            expected="a folder with room for them",
            do="Make room or save them elsewhere; what was there before is still there.",
        )
    )


def routers_not_found(name_or_path: str | os.PathLike[str], got: str) -> RoutersNotFoundError:
    """An error about routers that are missing or cannot be reached."""
    return RoutersNotFoundError(
        describe(
            f"no routers at {name_or_path}",
            got=got,
            expected="config.json and model.safetensors, as TIDERouters.save_pretrained writes them",
            do="Check the name and the network, or make routers with tide_hf.calibrate().",
        )
    )


def read_config(name_or_path: str | os.PathLike[str], **where: Any) -> tuple[TIDEConfig, str | None]:
    """Read the config of routers.

    Args:
        name_or_path: Folder or repository.
        **where: `cache_dir`, `revision`, `subfolder`, `token` and the like, as for `cached_file`.

    Returns:
        The config and its commit; `None` for a folder.

    Raises:
        RoutersFileError: It is no JSON.
        ConfigurationError: It has impossible values.
        OSError: It is not there, or the Hub cannot be reached.
    """
    file = _fetched(name_or_path, CONFIG_NAME, **where)
    try:
        content = json.loads(file.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RoutersFileError(file_problem(name_or_path, f"a {CONFIG_NAME} that is no JSON ({error})")) from error
    except (ValueError, RecursionError) as error:  # numbers too long or nesting too deep for the parser
        raise bad_config(quoted(error)) from error
    return TIDEConfig.from_dict(content), extract_commit_hash(str(file), None)


def read_weights(name_or_path: str | os.PathLike[str], **where: Any) -> bytes:
    """Read the file of weights; `where` is as for [`read_config`].

    Raises:
        OSError: It is not there, or the Hub cannot be reached.
    """
    return _fetched(name_or_path, SAFE_WEIGHTS_NAME, **where).read_bytes()


def _fetched(name_or_path: str | os.PathLike[str], name: str, subfolder: str = "", **where: Any) -> Path:
    if not Path(name_or_path).is_dir():
        return Path(str(cached_file(name_or_path, name, subfolder=subfolder, **where)))
    file = Path(name_or_path, subfolder, name)
    if not file.is_file():
        raise FileNotFoundError(f"a folder without {name}")
    return file


def write_routers(folder: Path, config: TIDEConfig, tensors: dict[str, Tensor]) -> None:
    """Write weights and config such that a kill at any time leaves the old routers or the new ones.

    Two files cannot be replaced atomically. The weights file therefore holds a copy of the config, which [`config_for`]
    uses if the config file is still the old one.

    Args:
        folder: Output folder; created if needed.
        config: The config; its `weights_sha256` is set.
        tensors: The weights.

    Raises:
        OSError: The folder cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    config.weights_sha256 = None
    own = config.to_json_string()
    content = save(tensors, {"format": "pt", OWN_CONFIG: own, OWN_DIGEST: _digest_with(own, save(tensors))})
    config.weights_sha256 = hashlib.sha256(content).hexdigest()
    weights_file, config_file = folder / SAFE_WEIGHTS_NAME, folder / CONFIG_NAME
    write_all_whole({weights_file: content, config_file: config.to_json_string().encode()})
    for file in (weights_file, config_file):
        remove_abandoned(file)


def config_for(name_or_path: str | os.PathLike[str], content: bytes, config: TIDEConfig) -> TIDEConfig:
    """The config that weights were saved with, after checking the checksum in it (safetensors has none).

    Args:
        name_or_path: Source of both files.
        content: The weights file, which safetensors could read.
        config: The config file. Those of earlier versions have no checksum and are accepted.

    Returns:
        That config; or the copy in the weights file, if a save was killed between the two files.

    Raises:
        RoutersFileError: The weights are damaged, or belong to another config.
    """
    known, found = config.weights_sha256, hashlib.sha256(content).hexdigest()
    if known in (None, found):
        return config
    facts = _header(content)[0].get("__metadata__", {})
    own = facts.get(OWN_CONFIG)
    if own is None or facts.get(OWN_DIGEST) != _digest_with(own, content):
        got = f"weights with SHA-256 {found[:12]}... where config.json says {str(known)[:12]}..."
        raise RoutersFileError(file_problem(name_or_path, got))
    logger.warning(
        "%s of %s belongs to other weights, as a save that was killed leaves it: the copy in %s is used. Save them "
        "again to mend that.",
        CONFIG_NAME,
        name_or_path,
        SAFE_WEIGHTS_NAME,
    )
    taken = TIDEConfig.from_dict(json.loads(own))
    taken.weights_sha256 = found
    return taken


def _header(content: bytes) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file, and the offset of its tensor data."""
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), start


def _digest_with(config: str, content: bytes) -> str:
    """SHA-256 of a config and the tensor data of a safetensors file."""
    digest = hashlib.sha256(config.encode())
    digest.update(memoryview(content)[_header(content)[1] :])
    return digest.hexdigest()


def read_router_pt(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a published `router.pt`, read without executing code in it."""
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
    """The first part of a `torch.save` file whose checksum does not match; torch itself does not check."""
    if not zipfile.is_zipfile(path):  # torch's older form has no checksums
        return None
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def copy_published(path: str | os.PathLike[str], linear: nn.Linear, weights: Any, name: str) -> None:
    """Copy the published weight `name` into a linear layer, and zero its bias."""
    weight = weights.get(name) if isinstance(weights, dict) else None
    if not isinstance(weight, Tensor) or not _is_plain(weight):
        raise bad_router_pt(path, f"{name} that is no dense tensor of floats")
    if weight.shape != linear.weight.shape:
        shapes = tuple(weight.shape), tuple(linear.weight.shape)
        raise bad_router_pt(path, f"{name} of shape {shapes[0]} where {shapes[1]} fits the base model")
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.zero_()


def _is_plain(weight: Tensor) -> bool:
    """Whether it is a dense float tensor; files may also hold sparse, nested, quantised or complex ones."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.is_nested or weight.layout != torch.strided:
        return False
    return weight.dtype.is_floating_point and weight.device.type == "cpu"


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
