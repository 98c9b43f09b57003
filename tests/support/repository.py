"""Where the repository is: examples, model cards and hub_kernels are no part of the package."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "model_cards" / "HuggingFaceTB--SmolLM2-135M-Instruct"  # routers
GUIDES = ROOT / "examples" / "guides"
# In the order in which they are read: the snippets of a page go on where those of the page before ended.
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", GUIDES / "calibration.md", GUIDES / "hub.md"]
SNIPPETS = [
    snippet
    for page in PAGES
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
]
