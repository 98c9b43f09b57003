"""Files of routers: atomic saving (for vLLM as well), checked loading, the reader of the published `router.pt`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ..common.errors import (
    ConfigurationError,
    RoutersFileError,
    RoutersNotFoundError,
    RoutersNotSavedError,
    TIDEError,
    first_line,
    quoted,
    short,
)
from ..common.files import remove_abandoned, write_atomically
from .config import TIDEConfig, bad_file, find_file, read_config
from .pickled import DAMAGE, read_pickled
from .speculators import NUM_DRAFT_TOKENS, from_speculators, speculators_config, to_speculators

# Where vLLM loads the draft head: the `model_type` by which it knows the format of the config, and the folder of the
# tensors that are not the head's. It refuses tensors that it does not know, and reads no folder within a repository.
SPECULATORS = "speculators"
OTHERS = "tide"  # also of a copy of the config while a save is under way
MAX_HEADER = 2**20  # bytes of names and shapes; each takes about a hundred
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

logger = logging.getLogger(__name__)


@contextmanager
def translated_errors(name_or_path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate errors of loading from `name_or_path` into `RoutersNotFoundError` and `RoutersFileError`."""
    try:
        yield
    except TIDEError:
        raise
    except OSError as error:
        raise routers_not_found(name_or_path, quoted(error)) from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise bad_file(name_or_path, quoted(error)) from error


def routers_not_found(name_or_path: str | os.PathLike[str], got: str) -> RoutersNotFoundError:
    """Make the error for routers that are missing or cannot be reached."""
    return RoutersNotFoundError(
        f"no routers at {name_or_path}",
        got=got,
        expected="config.json and model.safetensors, as TIDERouters.save_pretrained writes them",
        do="Check the name and the network, or make routers with tide_hf.calibrate().",
    )


def write_routers(folder: Path, config: TIDEConfig, tensors: dict[str, Tensor]) -> None:
    """Write weights and config; a process killed at any time leaves either the old routers or the new ones.

    Two files cannot be replaced atomically. Before the weights, a copy of the config is therefore written to `tide/`,
    in a file named by the weights' SHA-256, which [`matching_config`] uses if the config file is still the old one.

    A draft head is written in the format of the `speculators` package, so that vLLM loads it: `model.safetensors` has
    the head alone, and `config.json` that format's fields, with ours in the object `tide`. All other tensors are in
    `tide/`, in a file named by its SHA-256, so that the new one does not replace that of the old routers; that is
    removed at last, and a reader that the save overtakes may find it gone.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    config.weights_sha256 = config.others_sha256 = None
    files = {}
    if config.draft_head is not None:
        tensors, others = to_speculators(tensors, config.vocab_size)
        content = save(others, {"format": "pt"})
        config.others_sha256 = hashlib.sha256(content).hexdigest()
        files[_file_of(config.others_sha256)] = content
    content = save(tensors, {"format": "pt"})
    config.weights_sha256 = hashlib.sha256(content).hexdigest()
    text = _config_text(config).encode()
    copy = _file_of(config.weights_sha256, "json")
    write_files(folder, {**files, copy: text, SAFE_WEIGHTS_NAME: content, CONFIG_NAME: text})
    _remove_superseded(folder / OTHERS, config.others_sha256)


def _remove_superseded(folder: Path, current: str | None) -> None:
    """Remove the files of former saves, and what killed ones have left behind."""
    with suppress(OSError):  # what stays behind does no harm
        for name in {file.name.partition(".")[0] for file in folder.iterdir()} - {current}:
            for file in (folder / f"{name}.safetensors", folder / f"{name}.json"):
                if re.fullmatch("[0-9a-f]{64}", name):
                    remove_abandoned(file)
                    file.unlink(missing_ok=True)
        folder.rmdir()  # only where it is empty


def _config_text(config: TIDEConfig) -> str:
    if config.draft_head is None:
        return config.to_json_string()
    own = {"model_type": SPECULATORS, config.model_type: json.loads(config.to_json_string())}
    return json.dumps(speculators_config(config) | own, indent=2) + "\n"


def _file_of(sha256: str | None, suffix: str = "safetensors") -> str:
    return f"{OTHERS}/{sha256}.{suffix}"


def read_weights(
    name_or_path: str | os.PathLike[str], config: TIDEConfig, **where: Any
) -> tuple[TIDEConfig, dict[str, Tensor]]:
    """Read the tensors of routers, and check them by `config`; `where` is as for `find_file`.

    Returns the config that matches the weights (see [`matching_config`]) and the tensors.
    """
    content, tensors = read_safetensors(find_file(name_or_path, SAFE_WEIGHTS_NAME, **where))
    config = matching_config(name_or_path, hashlib.sha256(content).hexdigest(), config, **where)
    known = config.others_sha256
    if known is None:
        return config, tensors
    content, others = read_safetensors(find_file(name_or_path, _file_of(known), **where))
    found = hashlib.sha256(content).hexdigest()
    if found != known:
        raise bad_file(name_or_path, f"{_file_of(known)} with SHA-256 {found[:12]}...")
    return config, from_speculators(tensors, others)


def read_safetensors(file: Path) -> tuple[bytes, dict[str, Tensor]]:
    """The content of a safetensors file, and its tensors, which are no larger than the file.

    Raises:
        SafetensorError, ValueError: The file is damaged, or has too many or other tensors than PyTorch knows.
    """
    content = file.read_bytes()
    if int.from_bytes(content[:8], "little") > MAX_HEADER:
        raise ValueError(f"{file.name} with a header of over {MAX_HEADER} bytes")
    try:
        return content, load(content)
    except (AssertionError, LookupError, TypeError) as error:  # of safetensors, where PyTorch lacks a dtype
        raise ValueError(f"{file.name} with a tensor of dtype {first_line(error)}") from error


def misfit(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What is wrong with the first of `tensors` that does not fit; empty if all do.

    Names, shapes and kinds of numbers are those of `expected`, which may be on the meta device; the numbers are finite.
    """
    for name in sorted(tensors.keys() | expected.keys()):
        found, right = tensors.get(name), expected.get(name)
        if found is None or right is None:
            return f"{short(name)} {'is missing' if found is None else 'is unknown'}"
        if found.shape != right.shape:
            return f"{name} of shape {short(tuple(found.shape))} where {tuple(right.shape)} fits"
        if found.dtype != right.dtype and not (found.dtype in FLOATS and right.dtype in FLOATS):
            return f"{name} of {found.dtype} where {right.dtype} fits"
        if found.is_floating_point() and not bool(found.isfinite().all()):
            return f"{name} with NaN or infinite numbers"
    return ""


def write_speculators(routers: Any, folder: str | os.PathLike[str], num_draft_tokens: int = NUM_DRAFT_TOKENS) -> None:
    """Write the draft head of `routers` alone, in the format of the `speculators` package.

    `TIDERouters.save_pretrained` writes it in this format too, beside the routers' other parts.

    Args:
        routers: Routers with a draft head.
        folder: Folder for `config.json` and `model.safetensors`; made where it does not exist.
        num_draft_tokens: Draft tokens per pass that the config suggests to vLLM.

    Raises:
        ConfigurationError: The routers have no draft head.
        RoutersNotSavedError: The files could not be written.
    """
    if routers.config.draft_head is None:
        raise ConfigurationError(
            "there is no draft head to write",
            got="routers without one",
            expected="routers of calibrate(exit_strategy='eagle3'), or of a draft head that was loaded",
            do="Make them with tide_hf.calibrate(model, tokenizer, exit_strategy='eagle3').",
        )
    config = speculators_config(routers.config, num_draft_tokens)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in routers.state_dict().items()}
    head, _ = to_speculators(tensors, routers.config.vocab_size)
    write_files(Path(folder), {CONFIG_NAME: json.dumps(config, indent=2).encode(), SAFE_WEIGHTS_NAME: save(head)})


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    """Write files atomically, each after the one before; raise [`RoutersNotSavedError`] if that fails."""
    try:
        write_atomically({folder / name: content for name, content in contents.items()})
        for name in contents:
            remove_abandoned(folder / name)
    except OSError as error:
        with suppress(OSError):
            (folder / OTHERS).rmdir()  # only where it is empty
        raise RoutersNotSavedError(
            f"the routers could not be written to {folder}",
            got=quoted(error),
            expected="a folder with room for them",
            do="Make room or save them elsewhere; what was there before is still there.",
        ) from error


def matching_config(name_or_path: str | os.PathLike[str], found: str, config: TIDEConfig, **where: Any) -> TIDEConfig:
    """Check weights by the checksum in `config` (safetensors has none); return the config that matches the weights.

    That is `config`, or else its copy in `tide/` if a save was killed between the two files, or what `config.json` says
    by now if a save overtook the reader. Configs of earlier versions have no checksum and are accepted. Raises
    [`RoutersFileError`] if the weights are damaged, or belong to another config. `found` is the weights' SHA-256.
    """
    known = config.weights_sha256
    if known in (None, found):
        return config
    for file in (_file_of(found, "json"), CONFIG_NAME):
        with suppress(OSError):
            config = TIDEConfig.from_dict(read_config(name_or_path, file, **where)[0])
            if config.weights_sha256 != found:
                continue
            if file != CONFIG_NAME:
                left = f"belongs to other weights, as after a save that was killed: the copy in {file} is used"
                logger.warning("%s of %s %s. Save the routers again to repair it.", CONFIG_NAME, name_or_path, left)
            return config
    got = f"weights with SHA-256 {found[:12]}... where config.json says {str(known)[:12]}..."
    raise bad_file(name_or_path, got)


def read_router_pt(
    path: str | os.PathLike[str], hidden_size: int, num_layers: int
) -> tuple[int, dict[int, tuple[Tensor, Tensor]]]:
    """Read a published `router.pt`, without executing code in it, for a base model of the given size.

    Returns the routers' bottleneck width B, and for each exit layer the weights of `down`, (B, D), and `up`, (1, B). A
    router after the last layer has nothing to skip and is left out.
    """
    if not Path(path).is_file():
        raise RoutersNotFoundError(
            "no such file", got=path, expected="a router.pt of tide-inference", do="Check the path."
        )
    try:
        state = read_pickled(Path(path))
        bottleneck_dim = int(state["bottleneck_dim"])
        layers = {int(position) + 1: layer for position, layer in state["router_layers"].items()}
        layers.pop(num_layers, None)
        shapes = {"down.weight": (bottleneck_dim, hidden_size), "up.weight": (1, bottleneck_dim)}
        weights = {
            exit_layer: tuple(_weight(layer, name, shape) for name, shape in shapes.items())
            for exit_layer, layer in layers.items()
        }
    except DAMAGE as error:
        raise RoutersFileError(
            f"{path} cannot be used as a published router.pt",
            got=f"{type(error).__name__}: {first_line(error)}",
            expected="hidden_dim, bottleneck_dim and router_layers of tensors, as tide-inference saves them",
            do="Save it again with tide-inference, or calibrate afresh with tide_hf.calibrate().",
        ) from error
    return bottleneck_dim, weights  # type: ignore[return-value]


def _weight(layer: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the weight `name` of a router; raise `ValueError` if it does not fit."""
    if wrong := misfit({name: layer[name]}, {name: torch.empty(shape, device="meta")}):
        raise ValueError(wrong)
    return layer[name]
