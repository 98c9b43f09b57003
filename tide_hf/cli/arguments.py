"""Types of command-line arguments, and arguments shared by several commands. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any

from ..common.choices import DTYPES, ENGINES, MODES
from ..common.errors import ConfigurationError, describe

ALL = "all"


class CommandParser(argparse.ArgumentParser):
    """A parser that finds an optional positional argument after options too, as argparse does since Python 3.12.7."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, then assign the first remaining argument to an optional positional."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._get_positional_actions():
            missing = action.nargs == argparse.OPTIONAL and getattr(found, action.dest) is action.default
            if missing and rest and not rest[0].startswith("-"):
                setattr(found, action.dest, rest.pop(0))
        return found, rest


def _number(kind: type, accepts: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    """An argparse type for numbers, with `what` in its error."""

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not accepts(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return number

    return read


positive = _number(int, lambda number: 1 <= number < 2**31, "a whole number of at least 1, and below 2^31")
threads = _number(int, lambda number: 1 <= number <= 4096, "a number of threads, from 1 to 4096")
share = _number(float, lambda number: 0 < number < 1, "a number between 0 and 1")
amount = _number(float, lambda number: isfinite(number) and number >= 0, "a number of at least 0")
threshold = _number(
    float, lambda number: isfinite(number) and number >= 0, "a threshold: 0 always exits, above 1 nothing does"
)


def layer_list(text: str) -> list[int]:
    """Layers as in `8,16`."""
    return _listed(positive, text, "layers such as 8,16")


def threshold_list(text: str) -> list[float]:
    """Thresholds as in `0.9,0.8`."""
    return _listed(threshold, text, "thresholds such as 0.9,0.8")


def _listed(read: Callable[[str], Any], text: str, what: str) -> list[Any]:
    try:
        return [read(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}") from error


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *,
    model: str | None = None,
    dtype: str | None = None,
    routers: bool = True,
    device: bool = True,
) -> None:
    """Add the arguments that `model_arguments.load` reads: MODEL, --routers, --dtype, --device and --threads.

    Args:
        parser: Parser of the command.
        model: The default model; without one MODEL is required.
        dtype: The default dtype; without one that of the saved weights.
        routers: Whether the command uses routers.
        device: Whether the command has --device.
    """
    what = "Hub name or folder of the base model"
    if model is None:
        parser.add_argument("model", metavar="MODEL", help=what)
    else:
        parser.add_argument("model", metavar="MODEL", nargs="?", default=model, help=f"{what} (default: %(default)s)")
    if routers:
        parser.add_argument(
            "--routers",
            metavar="ROUTERS",
            help="folder or Hub repository, or default: those shipped for the model, which are also used where this is "
            "left out and there are some",
        )
    default = "%(default)s" if dtype is not None else "what it was saved in"
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help=f"to load the model in (default: {default})")
    if device:
        parser.add_argument("--device", help="such as cpu or cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--threads", type=threads, help="CPU threads (default: torch's)")


def add_mode_arguments(
    parser: argparse.ArgumentParser,
    *,
    mode: str = MODES[0],
    several: bool = False,
    threshold_default: str = "the calibrated one, or 0.9 where that lets no token leave",
) -> None:
    """Add --mode, --exit-threshold and --engine.

    Args:
        parser: Parser of the command.
        mode: The default mode.
        several: Whether the command compares modes, and so accepts `"all"`.
        threshold_default: Description of the default threshold.
    """
    choices = (ALL, *MODES) if several else MODES
    parser.add_argument("--mode", default=mode, choices=choices, help="how to decode (default: %(default)s)")
    parser.add_argument(
        "--exit-threshold", type=threshold, help=f"for early_exit and post_hoc (default: {threshold_default})"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="what runs the layers; making compiled ready takes about a minute on 2 cores, and minutes "
        "for larger batches: in chat and serve before the first answer, elsewhere in the first that needs it "
        "(default: %(default)s)",
    )


def add_decoding_arguments(
    parser: argparse.ArgumentParser, *, max_new_tokens: int, mode: str = MODES[0], several: bool = False
) -> None:
    """Add --mode, --exit-threshold, --engine and --max-new-tokens.

    Args:
        parser: Parser of the command.
        max_new_tokens: The default.
        mode: As in `add_mode_arguments`.
        several: As in `add_mode_arguments`.
    """
    add_mode_arguments(parser, mode=mode, several=several)
    parser.add_argument(
        "--max-new-tokens", type=positive, default=max_new_tokens, help="most tokens an answer (default: %(default)s)"
    )


def refuse_unused(args: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Refuse options that the command would ignore.

    Args:
        args: Arguments of the command.
        names: Names of the options in `args`.
        where: With or without which other option they are ignored, in words.

    Raises:
        ConfigurationError: One of them differs from its default.
    """
    unused = [name for name in names if getattr(args, name) != args.command_parser.get_default(name)]
    if unused:
        raise ConfigurationError(
            describe(
                f"an option would do nothing {where}",
                got=", ".join("--" + name.replace("_", "-") for name in unused),
                expected="options that change what the command does",
                do="Leave that out.",
            )
        )


def check_writable(file: Path, argument: str) -> None:
    """Check that `file` can be written, before minutes of measuring.

    Raises:
        ConfigurationError: It is a folder, its folder does not exist, or it is write-protected.
    """
    place = file if file.exists() else file.parent
    if file.is_dir() or not file.parent.is_dir() or not os.access(place, os.W_OK):
        raise ConfigurationError(
            describe(
                "the figures cannot be written there",
                got=f"{argument} {file}",
                expected="a file in a folder that exists and may be written to",
                do="Make the folder, or name another file.",
            )
        )


def make_folder(folder: Path) -> Path:
    """Create `folder` if needed and check that it can be written, before minutes of work.

    Raises:
        ConfigurationError: It cannot be created or written.
    """
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"'{error}'"
    if problem is None and not os.access(folder, os.W_OK | os.X_OK):
        problem = f"{folder}, which this user may not write to"
    if problem is not None:
        raise ConfigurationError(
            describe(
                "the output folder cannot be used",
                got=problem,
                expected="a folder, or a place where one can be made",
                do="Name another --output-dir.",
            )
        )
    return folder
