"""``tide-hf evaluate``: perplexity and exact match of early exits over thresholds, against the base model's."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from .arguments import check_writable, positive, threshold_list
from .calibration.report import Steps
from .calibration.tables import rich_table
from .evaluation import MATCHES, QualityOptions, QuestionColumns, measure_quality
from .evaluation.plots import save_quality_plot
from .evaluation.tables import quality_tables
from .model_arguments import add_model_arguments, load, required
from .plotting import figure_maker
from .provenance import provenance

DATA_HELP = "a .txt, .jsonl, .json or .parquet file, a folder of them, or a Hub data set (org/name:config[split])"


def add_evaluate(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    what = "measure what early exits cost in quality and save in depth, over thresholds"
    parser = commands.add_parser("evaluate", parents=[common], help=what, description=what.capitalize() + ".")
    defaults, columns = QualityOptions(), QuestionColumns()
    add_model_arguments(parser)
    parser.add_argument("--text", metavar="DATA", help=f"measure perplexity on {DATA_HELP}")
    parser.add_argument("--questions", metavar="DATA", help="measure exact match on data of the same kinds")
    parser.add_argument(
        "--thresholds",
        type=threshold_list,
        default=defaults.thresholds,
        help=f"such as 0.9,0.8 (default: {', '.join(map(str, defaults.thresholds))}); the calibrated one is added",
    )
    for name, text in {
        "samples": "most texts, and most questions",
        "max_length": "tokens after which a text is cut",
        "max_new_tokens": "most tokens of an answer",
        "batch_size": "texts or questions at once",
    }.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=positive, default=getattr(defaults, name), help=f"{text} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the draw from the data")
    parser.add_argument("--confidence", type=float, default=defaults.confidence, help="(default: %(default)s)")
    parser.add_argument("--question-column", default=columns.question, help="(default: %(default)s)")
    parser.add_argument("--answer-column", default=columns.answer, help="(default: %(default)s)")
    parser.add_argument(
        "--prompt", default=columns.template, metavar="TEMPLATE", help="what is asked (default: %(default)s)"
    )
    parser.add_argument(
        "--match",
        choices=MATCHES,
        default=defaults.match,
        help="exact: equal but for case, punctuation and articles; number: the last numbers are (default: %(default)s)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write quality against depth as a PNG to FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_evaluate)


def _evaluate(args: argparse.Namespace) -> None:
    options = _options(args)
    options.check()
    if args.plot is not None:
        figure_maker()
        check_writable(args.plot, "--plot")
    loaded = load(args, Console(stderr=True))
    routers = required(loaded.routers, "evaluate")
    with Steps(enabled=sys.stderr.isatty()) as steps:
        record = measure_quality(loaded.model, loaded.tokenizer, routers, options, steps)
    if args.plot is not None:
        save_quality_plot(record, args.plot)
    if args.json:
        command = f"tide-hf {shlex.join(args.argv)}"
        print(
            json.dumps(
                provenance(loaded.model) | {"command": command, "routers": loaded.routers_origin} | record, indent=2
            )
        )
    else:
        _print(record, Console())


def _print(record: dict[str, Any], console: Console) -> None:
    for title, table, note in quality_tables(record):
        console.print()
        console.print(rich_table(title, table))
        console.print(note, markup=False, highlight=False)


def _options(args: argparse.Namespace) -> QualityOptions:
    names = ("text", "questions", "thresholds", "samples", "max_length", "max_new_tokens", "match", "confidence")
    given = {name: getattr(args, name) for name in (*names, "batch_size", "seed")}
    return QualityOptions(columns=QuestionColumns(args.question_column, args.answer_column, args.prompt), **given)
