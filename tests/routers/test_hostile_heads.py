"""Heads of strangers are refused with an error of the library, at once, and in the memory that an honest head takes.

All are loaded one after another in one process, whose size is looked at after each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_heads import HONEST, HOSTILE, honest

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = [
    pytest.mark.xdist_group("hostile_heads"),  # so that one process loads them
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PyTorch's, about kinds of tensors that may change
]
MAX_SECONDS, MAX_MEGABYTES = 1, 200  # more than for an honest head


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What came of each head, by its name."""
    root = tmp_path_factory.mktemp("heads")
    heads = {name: (name, None) for name in HONEST} | HOSTILE
    folders = [root / str(number) for number in range(len(heads))]
    for folder, (kind, change) in zip(folders, heads.values(), strict=True):
        honest(kind, folder)
        if change is not None:
            change(folder)
    script = [sys.executable, SUPPORT / "hostile_heads.py", *folders]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])}
    run = subprocess.run(script, check=False, env=env, cwd=root, capture_output=True, text=True, timeout=600)
    assert not (root / "code-ran").exists()
    lines = run.stdout.splitlines()
    assert len(lines) == len(heads), f"{[*heads][len(lines)]}: {run.stderr[-2000:]}"
    return dict(zip(heads, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_head_loads(name, loaded):
    assert loaded[name]["message"] == ""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_head_is_refused_at_once(name, loaded):
    found, usual = loaded[name], loaded[HOSTILE[name][0]]
    assert "TIDEError" in found["kinds"], found
    assert "Expected" in found["message"]
    assert found["length"] < 2000
    assert found["seconds"] < usual["seconds"] + MAX_SECONDS
    assert found["grown"] < MAX_MEGABYTES


def test_there_are_at_least_sixty():
    assert len(HOSTILE) >= 60
