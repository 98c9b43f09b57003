"""Paths of the repository, and scripts in it: examples, model cards and hub_kernels are not part of the package."""

import os
import re
import subprocess
import sys
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


def in_two_processes(script, *arguments, cwd=None):
    """Run a script in two processes of torchrun, of one thread each."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, *map(str, (script, *arguments))]
    options = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 400}
    done = subprocess.run(command, cwd=cwd, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
