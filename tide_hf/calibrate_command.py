"""``tide-hf calibrate``: makes routers for a model and writes them, with their card, to a folder."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from .arguments import layer_list, make_folder, positive
from .calibration import STRATEGIES, calibrate
from .calibration.labels import LABELS
from .model_arguments import add_model_arguments, load
from .model_card import write_model_card

# Name, type or choices, and help of what is handed on to `calibrate()`, and only where it is given.
OPTIONS: dict[str, tuple[Any, str]] = {
    "dataset": (str, "what to calibrate on (default: text that the model itself writes)"),
    "samples": (positive, "documents to use"),
    "max_length": (positive, "longest document in tokens; of self-written ones, longest answer"),
    "labels": (LABELS, "what a router predicts"),
    "exit_strategy": (STRATEGIES, "kind of exit head"),
    "exit_layers": (layer_list, "numbers of executed layers after which a token may leave, such as 8,16"),
    "tolerance": (float, "largest share of tokens that may differ in early_exit, such as 0.02"),
    "confidence": (float, "probability with which the tolerance is kept, such as 0.95"),
    "draft_vocab_size": (positive, "heads draft only among so many of the most frequent tokens"),
    "max_minutes": (float, "most minutes to take"),
    "batch_size": (positive, "documents a forward pass"),
    "seed": (int, "of everything random"),
}


def add_calibrate(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    what = "make routers for a model and write them, with their card, to a folder"
    parser = commands.add_parser(
        "calibrate",
        parents=[common],
        help=what,
        description=f"{what.capitalize()}. Options that are left out take the defaults of tide_hf.calibrate().",
    )
    add_model_arguments(parser, routers=False)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help="where the routers go")
    for name, (kind, text) in OPTIONS.items():
        settings = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": name.upper()}
        parser.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **settings)
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_false",
        default=argparse.SUPPRESS,
        help="show neither progress bars nor the tables at the end",
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> None:
    folder = make_folder(args.output_dir)
    loaded = load(args, Console(stderr=True))
    options = {name: getattr(args, name) for name in (*OPTIONS, "progress") if hasattr(args, name)}
    routers = calibrate(loaded.model, loaded.tokenizer, output_dir=folder, **options)
    if routers.config.calibration is not None:
        routers.config.calibration["weights"] = getattr(loaded.model, "weights_origin", None)
        routers.config.calibration["command"] = f"tide-hf {shlex.join(args.argv)}"
    routers.save_pretrained(folder)
    card = write_model_card(routers, folder)
    done = f"The routers are in {folder}, their figures in {card}."
    print(done, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(routers.config.calibration, indent=2))
