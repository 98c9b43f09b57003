"""``tide-hf``: parses a command line and hands it on to `run` in `<command>_command.py`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from .commands import make_parser
from .errors import TIDEError

EXIT_USAGE = 2  # also what argparse exits with
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tide-hf`.

    Args:
        argv: The arguments; default: those of the process.

    Returns:
        The exit status: 0, 2 after an error that was explained on standard error, 130 where interrupted, 141 where
        nobody read the output to its end.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    args.parser, args.argv = parser, list(sys.argv[1:] if argv is None else argv)
    try:
        _run(args)
        sys.stdout.flush()
    except TIDEError as error:
        if args.debug:
            traceback.print_exc()
        print(f"tide-hf: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it closes it
        return EXIT_BROKEN_PIPE
    return 0


def _run(args: argparse.Namespace) -> None:
    """Load the command, which may take seconds, and run it."""
    command = import_module(f".{args.command}_command", __package__)
    if args.command != "completion" and not sys.stderr.isatty():
        import_module("transformers.utils.logging").disable_progress_bar()
    command.run(args)


if __name__ == "__main__":
    sys.exit(main())
