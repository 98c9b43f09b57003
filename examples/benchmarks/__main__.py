"""`python -m examples.benchmarks run --suite all`, then `python -m examples.benchmarks report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tide_hf.common.errors import TIDEError

from .report import add_report_arguments, report
from .runner import add_run_arguments, run_suites


def main(argv: Sequence[str] | None = None) -> int:
    """Run suites, or report.

    Returns:
        The exit status: 0, or 2 after an error that was explained on standard error.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks", description="Measure tide_hf side by side.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_run_arguments(commands.add_parser("run", help="run suites, and write their results as JSON"))
    add_report_arguments(commands.add_parser("report", help="render results as tables and plots"))
    args = parser.parse_args(argv)
    try:
        if args.command == "report":
            report(args)
        else:
            for file in run_suites(args):
                print(file)
    except TIDEError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
