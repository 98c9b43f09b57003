"""The Triton kernels, compiled for each generation of NVIDIA GPUs: no GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stage

pytest.importorskip("triton.backends.nvidia")

CAPABILITIES = (75, 80, 90, 100, 120)
MOST_REGISTERS = 128  # of a thread: with more, few blocks share a multiprocessor
MOST_STACK = 16  # bytes of a thread, which Triton 3.6 takes for one kernel


def compiled_for(folder, capability, *dtypes):
    """What `compile_for.py` finds, in a process of its own, since the tests' own Triton interprets."""
    variant = stage.stage_noarch(folder, "cuda")
    script = Path(__file__).with_name("compile_for.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, str(script), str(variant), str(capability), *dtypes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found):
    for one in found:
        assert "refused" not in one, one
        assert one["local"] == 0, one
        assert one["stack"] <= MOST_STACK, one  # next to nothing spills
        assert one["registers"] <= MOST_REGISTERS, one
        if one["kernel"] == "_kv_compact_kernel":  # reads that run ahead of its barriers would be of moved slots
            assert not one["asynchronous_copies"], one


def test_kernels_for_an_h100(tmp_path):
    found = compiled_for(tmp_path, 90, "bfloat16")
    check(found)
    assert {one["kernel"] for one in found} == {
        "_norm_route_kernel",
        "_kv_compact_kernel",
        "_block_top1_kernel",
        "_top1_kernel",
    }


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_for_each_generation(tmp_path, capability):
    check(compiled_for(tmp_path, capability, "float32", "float16", "bfloat16"))
