"""Kernels for CPUs: which there are."""

from pathlib import Path

from tide_hf.cpu import kernels
from tide_hf.cpu.kernels import KERNELS


def test_each_file_is_a_kernel():
    assert {path.stem for path in Path(kernels.__file__).parent.glob("*.cpp")} == set(KERNELS)
