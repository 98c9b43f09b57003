"""Where the repository is: examples, model cards and hub_kernels are no part of the package."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "model_cards" / "HuggingFaceTB--SmolLM2-135M-Instruct"  # routers
