"""Runs on a GPU where there is one, and under Triton's interpreter where there is none.

`TIDE_KERNELS=<folder>` names a folder of staged variants to test; by default the Triton variant is staged afresh.
"""

import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_USER_AGENT_ORIGIN", "tide_hf")  # without it kernels may send an illegal header
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import pytest  # noqa: E402

pytest.importorskip("triton")
pytest.importorskip("kernels")

sys.path.insert(0, str(Path(__file__).parent.parent))  # for stage.py
sys.path.insert(0, str(Path(__file__).parent))  # for reference64.py

import kernels  # noqa: E402
import stage  # noqa: E402

from tide_hf import ops as reference_ops  # noqa: E402


@pytest.fixture(scope="session")
def device():
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def kernel_module(tmp_path_factory):
    folder = os.environ.get("TIDE_KERNELS")
    if folder is None:
        folder = tmp_path_factory.mktemp("build")
        stage.stage_noarch(folder, DEVICE)
    return kernels.get_local_kernel(Path(folder))


@pytest.fixture(params=["kernel", "reference"])
def ops(request, kernel_module):
    """The kernels, and what stands in for them; both have to pass."""
    return kernel_module if request.param == "kernel" else reference_ops


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan():
    """What an op leaves unwritten shows: PyTorch fills new memory with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
