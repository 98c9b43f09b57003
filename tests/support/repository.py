"""Paths of the repository: examples, model cards and hub_kernels are not part of the package."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARDS = sorted(file.parent for file in ROOT.glob("model_cards/*/config.json"))  # folders of all shipped routers
SHIPPED = ROOT / "model_cards" / "HuggingFaceTB--SmolLM2-135M-Instruct"
GUIDES = ROOT / "examples" / "guides"
# In reading order: the snippets of a page use names that snippets of earlier pages define.
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", GUIDES / "calibration.md", GUIDES / "hub.md"]
SNIPPETS = [
    snippet
    for page in PAGES
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
]
