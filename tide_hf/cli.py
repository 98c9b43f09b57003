"""``tide-hf``: parses a command line and hands it on. Each subcommand is one function in `COMMANDS`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from transformers.utils import logging as transformers_logging

from . import __version__
from .arguments import CommandParser
from .benchmark_command import add_benchmark
from .calibrate_command import add_calibrate
from .chat_command import add_chat
from .completion_command import add_completion
from .demo_command import add_demo
from .errors import TIDEError
from .evaluate_command import add_evaluate
from .generate_command import add_generate
from .inspect_command import add_inspect
from .push_command import add_push
from .serve_command import add_serve

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
    parser = _parser()
    args = parser.parse_args(argv)
    args.parser, args.argv = parser, list(sys.argv[1:] if argv is None else argv)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        args.run(args)
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


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = CommandParser(prog="tide-hf", description="Token-informed depth for Hugging Face causal language models.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in COMMANDS:
        add_command(commands, common)
    return parser


COMMANDS = (
    add_demo,
    add_generate,
    add_chat,
    add_serve,
    add_calibrate,
    add_inspect,
    add_benchmark,
    add_evaluate,
    add_push,
    add_completion,
)


if __name__ == "__main__":
    sys.exit(main())
