"""``tide-hf evaluate``: measures the perplexity of early exits at several thresholds, and of the base model."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from ..common.display import figure_maker
from ..common.progress import Steps
from ..evaluation import QualityOptions, measure_quality
from ..evaluation.quality import quality_table, save_quality_plot
from ..hub.provenance import command_line, provenance
from ..routers.tables import rich_table
from .model_arguments import check_writable, load, required
from .parser import EVALUATE_OPTIONS, given_options


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    options = QualityOptions(text=args.text, **given_options(args, EVALUATE_OPTIONS))
    options.check()
    if args.plot is not None:
        figure_maker()
        check_writable(args.plot.parent, "--plot")
    loaded = load(args)
    routers = required(loaded.routers, "evaluate")
    with Steps(enabled=sys.stderr.isatty()) as steps:
        record = measure_quality(loaded.model, loaded.tokenizer, routers, options, steps)
    if args.plot is not None:
        save_quality_plot(record, args.plot)
    if args.json:
        facts = {"command": command_line(args.argv), "routers": loaded.routers_origin}
        print(json.dumps(provenance(loaded.model) | facts | record, indent=2))
    else:
        title, table, note = quality_table(record)
        console = Console()
        console.print()
        console.print(rich_table(title, table))
        console.print(note, markup=False, highlight=False)
