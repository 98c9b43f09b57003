"""The run on a GPU, rehearsed without one: what fails or takes too long ends nothing but itself."""

import json
import tarfile

import pytest
import torch

from examples.benchmarks import gpu, gpu_probe
from examples.benchmarks.gpu import Step


def test_a_step_that_fails_or_hangs_leaves_the_others(tmp_path, monkeypatch):
    hangs = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    (tmp_path / "hangs.py").write_text(f"print('begun', flush=True)\n{hangs}\ntime.sleep(600)\n")
    (tmp_path / "fails.py").write_text("raise RuntimeError('an illegal access')\n")
    monkeypatch.setitem(gpu.ENVIRONMENT, "PYTHONPATH", f"{gpu.ROOT}:{tmp_path}")
    attention = next(step for step in gpu.steps(rehearse=True) if step.name == "attention")
    planned = [Step("fails", 30, ("fails",)), Step("hangs", 3, ("hangs",)), attention]
    monkeypatch.setattr(gpu, "steps", lambda rehearse: planned)
    output = tmp_path / "output"
    assert gpu.main([str(output), "--rehearse", "--commit", "abc"]) == 2
    summary = json.loads((output / "summary.json").read_text())
    assert summary["commit"] == "abc"
    found = summary["steps"]
    assert (found["fails"]["status"], found["attention"]["status"]) == (1, 0)
    assert "an illegal access" in found["fails"]["log"]
    assert found["hangs"]["status"] == "cut off after 3 s"
    assert found["hangs"]["log"].startswith("begun\n")
    assert 'hangs.py", line 3 in <module>' in found["hangs"]["log"]  # where it was
    times = json.loads((output / "attention.json").read_text())["256 slots, width 4"]
    assert times["MATH"]["ms"] > 0
    assert "error" in times["CUDNN_ATTENTION"] or times["CUDNN_ATTENTION"]["ms"] > 0
    with tarfile.open(output / "everything.tar.gz") as tar:
        assert {"summary.json", "attention.json", "fails.log", "hangs.log"} <= set(tar.getnames())


def test_only_the_steps_that_are_named_run_while_there_is_time(tmp_path):
    assert gpu.main([str(tmp_path), "--rehearse", "--steps", "facts", "--seconds", "-1"]) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == {"facts": {"status": "no time left"}}


def test_the_order_of_attention_kernels_is_read_after_a_first_call_has_set_it(monkeypatch):
    order, attend = [1, 2, 0], gpu_probe.scaled_dot_product_attention
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: order, raising=False)
    monkeypatch.setattr(gpu_probe, "scaled_dot_product_attention", lambda *args: order.insert(0, 3) or attend(*args))
    assert gpu_probe.facts(rehearse=True)["attention_order"] == [3, 1, 2, 0]


@pytest.mark.slow
def test_every_step_can_be_rehearsed(tmp_path):
    assert gpu.main([str(tmp_path), "--rehearse"]) == 0
    smoke = json.loads((tmp_path / "smoke.json").read_text())
    assert all(found["equal"] for found in smoke.values())
    for name in ("speed", "exits", "static"):
        (model,) = json.loads((tmp_path / f"{name}.json").read_text())["models"].values()
        assert model["lines"]
        assert not [line for line in model["lines"].values() if "error" in line]
    assert json.loads((tmp_path / "facts.json").read_text())["copy_bytes_per_s"] > 0
