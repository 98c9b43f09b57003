"""``tide-hf completion``: the script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from .errors import MissingPackageError, describe

SHELLS = ("bash", "zsh")
PATHS = ("FILE", "FOLDER", "MODEL", "ROUTERS")  # metavars of what may be a path


def add_completion(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    what = "print a script that completes this program's commands and options in a shell"
    parser = commands.add_parser("completion", parents=[common], help=what, description=what.capitalize() + ".")
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=_completion)


def _completion(args: argparse.Namespace) -> None:
    try:
        import shtab  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise MissingPackageError(
            describe(
                "completion scripts cannot be made",
                got="no shtab",
                expected="shtab 1.7 or later",
                do="Run: pip install tide-hf[completion]",
            )
        ) from error
    for action in _actions(args.parser):
        if action.metavar in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(args.parser, shell=args.shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All options and arguments, those of the commands as well."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
