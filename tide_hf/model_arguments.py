"""The model that a command works on: the arguments that name it and say how it decodes, and loading it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .arguments import DTYPES, device_name, positive
from .benchmark import Contender, tide_contender, usable_threshold
from .configuration_tide import MODES
from .demo_model import load_demo_model
from .errors import ConfigurationError, describe
from .loading import shipped_routers
from .model import TIDEModelForCausalLM
from .modeling_tide import TIDERouters

ALL = "all"


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


def add_model_arguments(
    parser: argparse.ArgumentParser, *, model: str | None = None, dtype: str | None = None, routers: bool = True
) -> None:
    """Add the arguments that `load` reads: MODEL, --routers, --dtype, --device and --threads.

    Args:
        parser: Of the command.
        model: The default model; without one MODEL has to be given.
        dtype: The default dtype; without one it is what the model was saved in.
        routers: Whether the command uses routers.
    """
    what = "Hub name or folder of the base model"
    if model is None:
        parser.add_argument("model", metavar="MODEL", help=what)
    else:
        parser.add_argument("model", metavar="MODEL", nargs="?", default=model, help=f"{what} (default: %(default)s)")
    if routers:
        parser.add_argument(
            "--routers", metavar="ROUTERS", help="folder or Hub repository (default: those shipped for the model)"
        )
    default = "%(default)s" if dtype is not None else "what it was saved in"
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help=f"to load the model in (default: {default})")
    parser.add_argument("--device", type=device_name, help="such as cpu or cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")


def add_decoding_arguments(
    parser: argparse.ArgumentParser, *, max_new_tokens: int, mode: str = MODES[0], several: bool = False
) -> None:
    """Add --mode, --exit-threshold and --max-new-tokens.

    Args:
        parser: Of the command.
        max_new_tokens: The default.
        mode: The default mode.
        several: Whether the command compares modes, and so takes `"all"` as well.
    """
    choices = (ALL, *MODES) if several else MODES
    parser.add_argument("--mode", default=mode, choices=choices, help="how to decode (default: %(default)s)")
    parser.add_argument(
        "--exit-threshold",
        type=float,
        help="for early_exit and post_hoc (default: the calibrated one, or 0.9 where that lets no token leave)",
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=max_new_tokens, help="most tokens an answer (default: %(default)s)"
    )


def load(args: argparse.Namespace, console: Console) -> Loaded:
    """Load what the arguments of `add_model_arguments` name.

    Args:
        args: They.
        console: Where to say what goes on.

    Raises:
        DemoModelError: There is no such model.
        RoutersNotFoundError, RoutersFileError: There are no such routers, or they cannot be read.
        ConfigurationError: There is no such device.
    """
    device = _device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model, tokenizer = load_demo_model(args.model, dtype=args.dtype, console=console)
    asked = getattr(args, "routers", None)
    folder = asked or shipped_routers(args.model)
    routers = TIDERouters.from_pretrained(folder) if folder is not None else None
    return Loaded(model.to(device), tokenizer, routers, asked or (folder and f"shipped, {Path(folder).name}"))


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


def attached_contender(loaded: Loaded, args: argparse.Namespace) -> Contender:
    """Attach TIDE to the loaded model, to decode as the arguments of `add_decoding_arguments` say.

    Raises:
        TIDEError: The model or the routers do not allow that, as `TIDEModelForCausalLM.attach` says.
    """
    (mode,) = modes_to_run(args.mode, loaded.routers)
    threshold = usable_threshold(loaded.routers, args.exit_threshold)
    return tide_contender(TIDEModelForCausalLM.attach(loaded.model, loaded.routers, mode=mode), mode, threshold)


def _device(name: str | None) -> torch.device:
    """The device of that name; without one the accelerator, or else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return accelerator or torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.accelerator.device_count() if accelerator else 0
    there = [f"{accelerator.type}:{index}" for index in range(count)] if accelerator else []
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
