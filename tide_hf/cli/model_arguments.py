"""Load the model and routers that a command's arguments name; check that the command can write its output."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from ..common.busy import warn_if_busy
from ..common.choices import MODES
from ..common.errors import ConfigurationError
from ..evaluation.benchmark import DecodingMethod, tide_method, usable_threshold
from ..hub.load import (
    DEFAULT_ROUTERS,
    WITHOUT_ROUTERS,
    default_routers,
    find_routers,
    load_model,
    read_routers,
    shipped_routers,
)
from ..model import TIDEModelForCausalLM
from ..routers.eagle3 import ForeignHead
from ..routers.routers import TIDERouters
from .parser import ALL

NO_ROUTERS = "none: only n-grams draft, and early_exit and post_hoc cannot run"


@dataclass(frozen=True)
class Loaded:
    """A base model without TIDE attached, its tokenizer, its routers or `None`, and the source of the routers."""

    model: Any
    tokenizer: Any
    routers: TIDERouters | None
    routers_origin: str | None


def load(args: argparse.Namespace, loader: Callable[..., tuple[Any, Any]] = load_model) -> Loaded:
    """Load the model, tokenizer and routers that a command's arguments name; `loader` loads model and tokenizer."""
    device = _device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if device.type == "cpu":
        warn_if_busy()
    named = named_routers(args)  # first, so that a wrong --routers fails before the slow loading of the model
    model, tokenizer = loader(args.model, dtype=args.dtype)
    routers, origin = routers_for(model, args, named) if hasattr(args, "routers") else (None, None)
    return Loaded(model.to(device), tokenizer, routers, origin)


def named_routers(args: argparse.Namespace) -> TIDERouters | ForeignHead | None:
    """Load the routers, or the draft head, that --routers names; `None` without the option, for "default" or "none"."""
    asked = getattr(args, "routers", None)
    return None if asked in (None, DEFAULT_ROUTERS) else read_routers(asked)


def routers_for(
    model: Any, args: argparse.Namespace, named: TIDERouters | ForeignHead | None
) -> tuple[TIDERouters | None, str | None]:
    """Return the named routers, or else the routers shipped for the model, and the source of the routers."""
    if named is not None:
        return find_routers(named, model), args.routers
    folder = None if args.routers == WITHOUT_ROUTERS else shipped_routers(model)
    if folder is None and args.routers in (None, WITHOUT_ROUTERS):
        return None, None
    return default_routers(model), folder and f"shipped, {Path(folder).name}"


def modes_to_run(mode: str, routers: TIDERouters | None) -> list[str]:
    """The modes that --mode selects; "all" selects every mode that can run."""
    if mode == ALL:
        return list(MODES) if routers is not None and routers.exit_layers else ["self_speculative"]
    if mode != "self_speculative":
        required(routers, f"--mode {mode}")
    return [mode]


def required(routers: TIDERouters | None, needed_by: str) -> TIDERouters:
    """Return `routers`, or raise [`ConfigurationError`] if there are none."""
    if routers is None:
        raise ConfigurationError(
            "there are no routers for the model",
            got=f"{needed_by}, which needs them",
            expected="a folder or Hub repository of routers",
            do="Pass --routers; tide-hf calibrate makes some.",
        )
    return routers


def attached_method(loaded: Loaded, args: argparse.Namespace) -> DecodingMethod:
    """Attach TIDE to the loaded model, with the decoding arguments of the command."""
    (mode,) = modes_to_run(args.mode, loaded.routers)
    threshold = usable_threshold(loaded.routers, args.exit_threshold)
    options = {"mode": mode, "engine": args.engine, "compute_dtype": args.compute_dtype}
    attached = TIDEModelForCausalLM.attach(loaded.model, loaded.routers, **options)
    return tide_method(attached, mode, threshold)


def check_writable(folder: Path, option: str) -> None:
    """Create `folder` if needed, and raise [`ConfigurationError`] if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            "the output cannot be written", got=f"'{error}'", expected="a writable folder", do=f"Name another {option}."
        ) from error


def _device(name: str | None) -> torch.device:
    """The device called `name`; by default the accelerator, or the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    available = ["cpu"]
    if accelerator is not None:
        available += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    with suppress(RuntimeError):  # raised for a device type that PyTorch does not know
        device = torch.device(name)
        if device.type == "cpu" or f"{device.type}:{device.index or 0}" in available:
            return device
    raise ConfigurationError(
        "there is no such device", got=f"--device {name}", expected=" or ".join(available), do="Leave --device out."
    )
