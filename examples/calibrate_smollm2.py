"""Makes the routers in model_cards/HuggingFaceTB--SmolLM2-135M-Instruct: `python examples/calibrate_smollm2.py`.

It writes to that folder. After an interruption, run it again to resume: the shipped routers were made in several runs,
on two cores, with 30 minutes for the draft head.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from tide_hf import calibrate
from tide_hf.cli.demo_model import load_demo_model

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path(__file__).parent.parent / "model_cards" / NAME.replace("/", "--")


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)  # accepts only --help
    model, tokenizer = load_demo_model(NAME, dtype=torch.bfloat16)
    settings = {"samples": 16000, "batch_size": 256, "exit_layers": [16, 24, 28], "max_minutes": 100}
    model.config._name_or_path = NAME  # the base model in the routers' config, wherever the weights came from
    notes = {"weights": getattr(model, "weights_origin", None), "command": "python examples/calibrate_smollm2.py"}
    calibrate(model, tokenizer, **settings, notes=notes, output_dir=FOLDER)


if __name__ == "__main__":
    main()
