"""Makes the routers in model_cards/HuggingFaceTB--SmolLM2-135M-Instruct: `python examples/calibrate_smollm2.py`.

It writes to that folder. After an interruption, run it again to resume.
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
    model, tokenizer = load_demo_model(NAME, dtype=torch.float32)
    settings = {"samples": 18000, "max_length": 96, "batch_size": 192, "exit_strategy": "block"}
    settings["exit_layers"] = [16, 24, 28]
    model.config._name_or_path = NAME  # the base model in the routers' config, wherever the weights came from
    notes = {"weights": getattr(model, "weights_origin", None), "command": "python examples/calibrate_smollm2.py"}
    calibrate(model, tokenizer, **settings, notes=notes, output_dir=FOLDER)


if __name__ == "__main__":
    main()
