"""Makes the routers in model_cards/HuggingFaceTB--SmolLM2-135M-Instruct: `python examples/calibrate_smollm2.py`."""

from pathlib import Path

import torch

from tide_hf import calibrate
from tide_hf.demo_model import load_demo_model
from tide_hf.model_card import write_model_card

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path(__file__).parent.parent / "model_cards" / NAME.replace("/", "--")

if __name__ == "__main__":
    model, tokenizer = load_demo_model(NAME, dtype=torch.float32)
    settings = {"samples": 18000, "max_length": 96, "batch_size": 192, "exit_strategy": "block"}
    settings["exit_layers"] = [16, 24, 28]
    routers = calibrate(model, tokenizer, **settings, output_dir=FOLDER)
    routers.config.base_model_name_or_path = NAME
    routers.config.calibration["weights"] = getattr(model, "weights_origin", None)
    routers.config.calibration["command"] = "python examples/calibrate_smollm2.py"
    routers.save_pretrained(FOLDER)
    write_model_card(routers, FOLDER)
