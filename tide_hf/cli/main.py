"""``tide-hf``: parses the command line and calls `run` in the module of the command."""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module

from ..common.errors import TIDEError
from .parser import make_parser

EXIT_USAGE = 2  # also the status that argparse exits with
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
# What torchao logs as warnings wherever transformers finds it, by these loggers: on parts for GPUs that are not there,
# and on its own calls of PyTorch.
TORCHAO_LOGGERS = ("torchao", "torch.utils._pytree")
TORCHAO_NOISE = re.compile("Failed to load .*_C_(mxfp8|cutlass)|is an Enum subclass and is now natively supported")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tide-hf` with `argv`, by default the arguments of the process; return the exit status.

    The status is 0, or 2 after an error explained on standard error, 130 if interrupted, 141 after a broken pipe.
    """
    _open_streams()
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and args.command != "serve":  # serve passes unknown options on to `transformers serve`
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.passed_on, args.parser = unknown, parser
    args.argv = list(sys.argv[1:] if argv is None else argv)
    if args.debug:
        logging.basicConfig()  # to standard error
        logging.getLogger("tide_hf").setLevel("INFO")
    try:
        _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except (TIDEError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        if not isinstance(error, TIDEError):  # such as a full disk, or no permission to write a file
            _drop_output()
            error = TIDEError(
                "the system refused to read or write",
                got=f"'{error}'",
                expected="files that can be read or written, and enough disk space",
                do="Correct that, or name other files. --debug shows where it happened.",
            )
        print(f"tide-hf: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _run(args: argparse.Namespace) -> None:
    """Prepare the arguments, then import the command's module, which may take seconds, and run the command."""
    if hasattr(args, "prepare"):
        args.prepare(args)
    for name in TORCHAO_LOGGERS:
        logging.getLogger(name).addFilter(_is_no_noise)
    with _importing(args):
        command = import_module(f".{args.command}", __package__)
    if args.command != "completion" and not sys.stderr.isatty():
        import_module("transformers.utils.logging").disable_progress_bar()
    command.run(args)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return TORCHAO_NOISE.search(record.getMessage()) is None


def _importing(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Show on a terminal that PyTorch is being imported; `completion` does not import it."""
    if args.command == "completion" or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console  # noqa: PLC0415 - not needed for help and errors, which come at once

    from ..common.progress import waiting  # noqa: PLC0415

    return waiting(Console(stderr=True), "Importing PyTorch and transformers")


def _open_streams() -> None:
    """Replace standard streams that the caller closed (Python sets them to `None`) by the null device.

    Characters that standard output cannot encode become question marks instead of an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Discard the rest of the output, which Python would fail to flush at exit."""
    with suppress(OSError):  # standard output may have no file descriptor, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
