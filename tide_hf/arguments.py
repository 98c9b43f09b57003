"""Kinds of command-line arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .errors import ConfigurationError, describe

DTYPES = ("float32", "bfloat16", "float16")


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
