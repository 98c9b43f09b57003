"""``tide-hf``: parses a command line and hands it on. Each subcommand is one function in `COMMANDS`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from . import __version__
from .arguments import DTYPES, positive
from .calibrate_command import add_calibrate
from .configuration_tide import MODES
from .demo import PROMPTS, DemoOptions, run_demo
from .demo_model import DEFAULT_MODEL
from .errors import TIDEError
from .evaluate_command import add_evaluate
from .inspect_command import add_inspect
from .push_command import add_push
from .serve_command import add_serve

EXIT_USAGE = 2  # also what argparse exits with
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tide-hf`.

    Args:
        argv: The arguments; default: those of the process.

    Returns:
        The exit status: 0, 2 after an error that was explained on standard error, 130 where interrupted.
    """
    args = _parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        args.run(args)
    except TIDEError as error:
        if args.debug:
            raise
        print(f"tide-hf: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="tide-hf", description="Token-informed depth for Hugging Face causal language models."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in COMMANDS:
        add_command(commands, common)
    return parser


def _add_demo(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    what = "show how deep each token runs, and measure every mode against plain generate"
    demo = commands.add_parser("demo", parents=[common], help=what, description=what.capitalize() + ".")
    defaults = DemoOptions()
    demo.add_argument("--model", default=DEFAULT_MODEL, help="Hub name or folder (default: %(default)s)")
    demo.add_argument("--routers", help="folder or Hub repository (default: those that are shipped for the model)")
    demo.add_argument("--mode", default="all", choices=("all", *MODES), help="what to measure (default: %(default)s)")
    demo.add_argument("--prompt", action="append", help=f"may be repeated (default: {len(PROMPTS)} built-in prompts)")
    demo.add_argument("--max-new-tokens", type=positive, default=defaults.max_new_tokens, help="(default: %(default)s)")
    demo.add_argument("--dtype", default=defaults.dtype, choices=DTYPES, help="(default: %(default)s)")
    demo.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")
    demo.add_argument("--exit-threshold", type=float, help="for early_exit and post_hoc (default: the calibrated one)")
    demo.add_argument("--repeats", type=positive, default=defaults.repeats, help="timed runs (default: %(default)s)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures and where they are from to FILE")
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> None:
    options = DemoOptions(
        model=args.model,
        routers=args.routers,
        modes=MODES if args.mode == "all" else (args.mode,),
        prompts=tuple(args.prompt or PROMPTS),
        max_new_tokens=args.max_new_tokens,
        dtype=args.dtype,
        threads=args.threads,
        exit_threshold=args.exit_threshold,
        repeats=args.repeats,
        json_file=args.json,
    )
    run_demo(options, Console())


COMMANDS = (_add_demo, add_calibrate, add_inspect, add_evaluate, add_push, add_serve)


if __name__ == "__main__":
    sys.exit(main())
