"""Runs on a GPU where there is one, and under Triton's interpreter where there is none.

`TIDE_KERNELS=<folder>` names a staged variant to test; by default the Triton variant is staged afresh.
"""

import os
import sys
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import pytest  # noqa: E402

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parent.parent))  # for stage.py and plain.py
sys.path.insert(0, str(Path(__file__).parent))  # for reference64.py

import plain  # noqa: E402
import stage  # noqa: E402


@pytest.fixture(scope="session")
def device():
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def kernel_module(tmp_path_factory):
    folder = os.environ.get("TIDE_KERNELS") or stage.stage_noarch(tmp_path_factory.mktemp("build"), DEVICE)
    return stage.load_variant(Path(folder))


@pytest.fixture(params=["kernel", "plain"])
def ops(request, kernel_module):
    """The kernels and their plain form; both have to pass."""
    return kernel_module if request.param == "kernel" else plain


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan():
    """Show what an op leaves unwritten: PyTorch fills new memory with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
