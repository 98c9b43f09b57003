"""Two processes that share a model decide alike, whatever each of them measures and draws."""

import json
import os
import subprocess
import sys

import pytest
import torch
from repository import ROOT


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_processes_that_share_a_model_decide_alike(tiny_llama, tmp_path):
    tiny_llama(eos_token_id=None).save_pretrained(tmp_path)
    script = ROOT / "tests" / "support" / "tensor_parallel_script.py"
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, "-m", *launcher, str(script), str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["tokens"][0] == first["tokens"][1] == first["plain"]
    assert first["tokens"][2] != first["plain"]
    assert first["drafted"][0][0] > 0
