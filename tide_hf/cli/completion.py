"""``tide-hf completion``: prints a shell script that completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ..common.errors import MissingPackageError

PATHS = ("FILE", "FOLDER", "MODEL", "ROUTERS")  # metavars of arguments that may be paths


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    try:
        import shtab  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise MissingPackageError(
            "completion scripts cannot be made",
            got="no shtab",
            expected="shtab 1.7 or later",
            do="Run: pip install tide-hf[completion]",
        ) from error
    for action in _actions(args.parser):
        if action.metavar in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(args.parser, shell=args.shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All options and arguments of the parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
