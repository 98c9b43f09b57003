"""Makes the routers in model_cards/HuggingFaceTB--SmolLM2-135M-Instruct: `python examples/calibrate_smollm2.py`."""

from pathlib import Path

import torch

from tide_hf import calibrate
from tide_hf.demo_model import load_demo_model

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path(__file__).parent.parent / "model_cards" / NAME.replace("/", "--")

if __name__ == "__main__":
    model, tokenizer = load_demo_model(NAME, dtype=torch.float32)
    settings = {"samples": 18000, "max_length": 96, "batch_size": 192, "exit_strategy": "block"}
    settings["exit_layers"] = [16, 24, 28]
    model.config._name_or_path = NAME  # which the routers name as their base, wherever the weights came from
    notes = {"weights": getattr(model, "weights_origin", None), "command": "python examples/calibrate_smollm2.py"}
    calibrate(model, tokenizer, **settings, notes=notes, output_dir=FOLDER)
