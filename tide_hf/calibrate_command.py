"""``tide-hf calibrate``: makes routers for a model and writes them, with their card, to a folder."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .arguments import DTYPES, layer_list, make_folder, positive
from .calibration import STRATEGIES, calibrate
from .calibration.labels import LABELS
from .demo_model import load_demo_model
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
    parser.add_argument("model", metavar="MODEL", help="Hub name or folder of the base model")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help="where the routers go")
    for name, (kind, text) in OPTIONS.items():
        settings = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": name.upper()}
        parser.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **settings)
    parser.add_argument("--dtype", choices=DTYPES, help="to load the model in (default: what it was saved in)")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_false",
        default=argparse.SUPPRESS,
        help="show neither progress bars nor the tables at the end",
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> None:
    folder = make_folder(args.output_dir)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    console = Console(stderr=True)
    model, tokenizer = load_demo_model(args.model, dtype=args.dtype, console=console)
    options = {name: getattr(args, name) for name in (*OPTIONS, "progress") if hasattr(args, name)}
    routers = calibrate(model, tokenizer, output_dir=folder, **options)
    if routers.config.calibration is not None:
        routers.config.calibration["weights"] = getattr(model, "weights_origin", None)
        routers.config.calibration["command"] = f"tide-hf {shlex.join(args.argv)}"
    routers.save_pretrained(folder)
    card = write_model_card(routers, folder)
    print(f"The routers are in {folder}, their figures in {card}.")
