"""``tide-hf calibrate``: makes routers for a model and writes them, with their card, to a folder."""

from __future__ import annotations

import argparse
import json
import sys

from ..calibration import calibrate
from ..hub.provenance import command_line
from .model_arguments import check_writable, load
from .parser import CALIBRATE_OPTIONS, given_options


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    folder = args.output_dir
    check_writable(folder, "--output-dir")
    loaded = load(args)
    options = given_options(args, (*CALIBRATE_OPTIONS, "progress"))
    notes = {"weights": getattr(loaded.model, "weights_origin", None), "command": command_line(args.argv)}
    routers = calibrate(loaded.model, loaded.tokenizer, output_dir=folder, notes=notes, **options)
    done = f"The routers are in {folder}, their figures in {folder / 'README.md'}."
    print(done, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(routers.config.calibration, indent=2))
