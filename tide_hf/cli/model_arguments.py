"""The model that the arguments of a command name, loaded."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..common.choices import MODES
from ..common.errors import ConfigurationError, describe
from ..evaluation.baselines import tide_method, usable_threshold
from ..evaluation.benchmark import DecodingMethod
from ..hub.load import DEFAULT_ROUTERS, default_routers, load_model, shipped_routers
from ..model import TIDEModelForCausalLM
from ..routers.routers import TIDERouters
from .arguments import ALL

logger = logging.getLogger(__name__)
NO_ROUTERS = "none: drafts come from n-grams alone, early_exit and post_hoc cannot run"


@dataclass(frozen=True)
class Loaded:
    """What the arguments name.

    Attributes:
        model: The base model, not attached.
        tokenizer: Its tokenizer.
        routers: Its routers, if there are any.
        routers_origin: Where they are from, for people.
    """

    model: Any
    tokenizer: Any
    routers: TIDERouters | None
    routers_origin: str | None


def load(args: argparse.Namespace, loader: Callable[..., tuple[Any, Any]] = load_model) -> Loaded:
    """Load what the arguments of `arguments.add_model_arguments` name.

    Args:
        args: They.
        loader: Gives model and tokenizer for a name and a `dtype`.

    Raises:
        ModelNotFoundError: There is no such model.
        RoutersNotFoundError, RoutersFileError: There are no such routers, or they cannot be read.
        ConfigurationError: There is no such device.
    """
    device = _device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if device.type == "cpu":
        warn_if_busy(torch.get_num_threads())
    named = named_routers(args)  # first, since they are small
    model, tokenizer = loader(args.model, dtype=args.dtype)
    routers, origin = routers_for(model, args, named) if hasattr(args, "routers") else (None, None)
    return Loaded(model.to(device), tokenizer, routers, origin)


def named_routers(args: argparse.Namespace) -> TIDERouters | None:
    """The routers of the folder or repository that the arguments name, if they name one.

    Raises:
        RoutersNotFoundError, RoutersFileError: There are none, or they cannot be read.
    """
    asked = getattr(args, "routers", None)
    return None if asked in (None, DEFAULT_ROUTERS) else TIDERouters.from_pretrained(asked)


def routers_for(
    model: Any, args: argparse.Namespace, named: TIDERouters | None
) -> tuple[TIDERouters | None, str | None]:
    """The routers that the arguments name, else those that come with this library, and where they are from, for people.

    Args:
        model: The base model.
        args: They.
        named: Of [`named_routers`].

    Raises:
        RoutersNotFoundError: Those that come with this library are asked for, and none fits the model.
    """
    if named is not None:
        return named, args.routers
    folder = shipped_routers(model)
    if folder is None and args.routers is None:
        return None, None
    return default_routers(model), folder and f"shipped, {Path(folder).name}"


def warn_if_busy(threads: int) -> None:
    """Warn where other work leaves no cores to threads that wait for each other by spinning, as OpenMP's do.

    Args:
        threads: How many compute.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none
    cores = os.cpu_count() or 1
    if threads > 1 and load > cores:
        logger.warning(
            "This machine is busy: its load average is %.1f on %d cores. Threads of PyTorch that wait for each other "
            "then take time from each other; on cores that other work fills, --threads 1 can be several times as fast.",
            load,
            cores,
        )


def modes_to_run(mode: str, routers: TIDERouters | None) -> list[str]:
    """The modes that --mode stands for; of "all", those that can run.

    Raises:
        ConfigurationError: The one that was asked for needs routers, and there are none.
    """
    if mode == ALL:
        return list(MODES) if routers is not None else ["self_speculative"]
    if mode != "self_speculative":
        required(routers, f"--mode {mode}")
    return [mode]


def required(routers: TIDERouters | None, needed_by: str) -> TIDERouters:
    """The routers.

    Raises:
        ConfigurationError: There are none.
    """
    if routers is None:
        raise ConfigurationError(
            describe(
                "there are no routers for the model",
                got=f"{needed_by}, which needs them",
                expected="a folder or Hub repository of routers",
                do="Pass --routers; tide-hf calibrate makes some.",
            )
        )
    return routers


def attached_method(loaded: Loaded, args: argparse.Namespace) -> DecodingMethod:
    """Attach TIDE to the loaded model, to decode as the arguments of `arguments.add_decoding_arguments` say.

    Raises:
        TIDEError: The model or the routers do not allow that, as `TIDEModelForCausalLM.attach` says.
    """
    (mode,) = modes_to_run(args.mode, loaded.routers)
    threshold = usable_threshold(loaded.routers, args.exit_threshold)
    attached = TIDEModelForCausalLM.attach(loaded.model, loaded.routers, mode=mode, engine=args.engine)
    return tide_method(attached, mode, threshold)


def _device(name: str | None) -> torch.device:
    """The device of that name; without one the accelerator, or else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    count = torch.accelerator.device_count() if accelerator else 0
    there = [f"{accelerator.type}:{index}" for index in range(count)] if accelerator else []
    try:
        device = torch.device(name)
    except RuntimeError:  # torch knows no device of that kind
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    if f"{device.type}:{device.index or 0}" not in there:
        raise ConfigurationError(
            describe(
                "there is no such device",
                got=f"--device {name}",
                expected=" or ".join(["cpu", *there]),
                do="Name one of these, or leave --device out.",
            )
        )
    return device
