"""Kinds of command-line arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigurationError, describe

DTYPES = ("float32", "bfloat16", "float16")


class CommandParser(argparse.ArgumentParser):
    """A parser that finds an optional argument also behind options; argparse does so from Python 3.12.7 on."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, and give the first argument that is left to the optional one that got none."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._get_positional_actions():
            missing = action.nargs == argparse.OPTIONAL and getattr(found, action.dest) is action.default
            if missing and rest and not rest[0].startswith("-"):
                setattr(found, action.dest, rest.pop(0))
        return found, rest


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def layer_list(text: str) -> list[int]:
    """Layers as in `8,16`."""
    try:
        return [positive(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 8,16") from error


def threshold_list(text: str) -> list[float]:
    """Thresholds as in `0.9,0.8`."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of thresholds such as 0.9,0.8") from error


def check_writable(file: Path, argument: str) -> None:
    """Find out before minutes of measuring, not after, that `file` can be written to.

    Raises:
        ConfigurationError: It is a folder, or lies in none.
    """
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigurationError(
            describe(
                "the figures cannot be written there",
                got=f"{argument} {file}",
                expected="a file in a folder that exists",
                do="Make the folder, or name another file.",
            )
        )


def device_name(text: str) -> str:
    """A device as torch writes it."""
    try:
        return str(torch.device(text))
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device such as cpu or cuda:1") from error


def make_folder(folder: Path) -> Path:
    """Make `folder` where it does not exist, before minutes of work whose outcome is to go there.

    Raises:
        ConfigurationError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            describe(
                "the output folder cannot be made",
                got=f"'{error}'",
                expected="a folder, or a place where one can be made",
                do="Name another --output-dir.",
            )
        ) from error
    return folder
