"""Runs the tests on pretended devices in processes of their own, since a device changes what a whole process does."""

import os
import subprocess
import sys

import pytest
import torch
from repository import ROOT


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, and a process has one kind")
@pytest.mark.parametrize("name", ["on_pretend_device.py", "rounds_on_pretend_device.py"])
def test_everything_runs_on_devices_other_than_the_cpu(name, tmp_path):
    script = ROOT / "tests" / "support" / name
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--basetemp", str(tmp_path / "inside"), str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
