"""Loading of the model and routers that the arguments of a command name."""

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
    """A loaded model with its routers.

    Attributes:
        model: The base model, not attached.
        tokenizer: Its tokenizer.
        routers: Its routers, if there are any.
        routers_origin: Their source, to show.
    """

    model: Any
    tokenizer: Any
    routers: TIDERouters | None
    routers_origin: str | None


def load(args: argparse.Namespace, loader: Callable[..., tuple[Any, Any]] = load_model) -> Loaded:
    """Load model and routers named by the arguments of `arguments.add_model_arguments`.

    Args:
        args: Arguments of the command.
        loader: Loads model and tokenizer by name and `dtype`.

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
    named = named_routers(args)  # before the model, since they load faster
    model, tokenizer = loader(args.model, dtype=args.dtype)
    routers, origin = routers_for(model, args, named) if hasattr(args, "routers") else (None, None)
    return Loaded(model.to(device), tokenizer, routers, origin)


def named_routers(args: argparse.Namespace) -> TIDERouters | None:
    """Load the routers of --routers, if it names a folder or repository.

    Raises:
        RoutersNotFoundError, RoutersFileError: There are none, or they cannot be read.
    """
    asked = getattr(args, "routers", None)
    return None if asked in (None, DEFAULT_ROUTERS) else TIDERouters.from_pretrained(asked)


def routers_for(
    model: Any, args: argparse.Namespace, named: TIDERouters | None
) -> tuple[TIDERouters | None, str | None]:
    """The named routers, or else the shipped ones, and their source.

    Args:
        model: The base model.
        args: Arguments of the command.
        named: Result of [`named_routers`].

    Raises:
        RoutersNotFoundError: `--routers default` is given, and none are shipped for the model.
    """
    if named is not None:
        return named, args.routers
    folder = shipped_routers(model)
    if folder is None and args.routers is None:
        return None, None
    return default_routers(model), folder and f"shipped, {Path(folder).name}"


def warn_if_busy(threads: int) -> None:
    """Warn if the machine is overloaded, which slows down OpenMP threads that wait for each other by spinning.

    Args:
        threads: Number of compute threads.
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
    """The modes of --mode; for "all", those that can run.

    Raises:
        ConfigurationError: The mode needs routers, and there are none.
    """
    if mode == ALL:
        return list(MODES) if routers is not None else ["self_speculative"]
    if mode != "self_speculative":
        required(routers, f"--mode {mode}")
    return [mode]


def required(routers: TIDERouters | None, needed_by: str) -> TIDERouters:
    """Return `routers`, or raise [`ConfigurationError`] if there are none."""
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
    """Attach TIDE to the loaded model, with the arguments of `arguments.add_decoding_arguments`.

    Raises:
        TIDEError: As `TIDEModelForCausalLM.attach`.
    """
    (mode,) = modes_to_run(args.mode, loaded.routers)
    threshold = usable_threshold(loaded.routers, args.exit_threshold)
    attached = TIDEModelForCausalLM.attach(loaded.model, loaded.routers, mode=mode, engine=args.engine)
    return tide_method(attached, mode, threshold)


def _device(name: str | None) -> torch.device:
    """The device of that name; by default the accelerator, or else the CPU."""
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
