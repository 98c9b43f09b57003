"""Kernels for CPUs: which there are, and that they are compiled at the same time, before they are needed."""

from pathlib import Path
from threading import Barrier

import pytest
import torch
from test_captured_steps import OPTIONS, prompts
from test_compiled_steps import attach
from torch._inductor.codecache import CppCodeCache

from tide_hf.cpu import kernels
from tide_hf.cpu.kernels import KERNELS, VALUES, compile_all, compiled

pytestmark = pytest.mark.usefixtures("fresh_kernels")


def test_each_file_is_a_kernel():
    assert {path.stem for path in Path(kernels.__file__).parent.glob("*.cpp")} == set(KERNELS)


def test_all_are_compiled_at_the_same_time(monkeypatch):
    together = Barrier(len(KERNELS))
    monkeypatch.setattr(CppCodeCache, "load", lambda *_args, **_kwargs: together.wait(timeout=30))
    compile_all(torch.bfloat16)
    assert compiled.cache_info().currsize == len(KERNELS)
    compile_all(torch.float16)  # for which there are none
    assert compiled.cache_info().currsize == len(KERNELS)


def test_they_are_ready_before_the_first_prompt_is_read(tiny_llama, monkeypatch):
    found = []
    model = tiny_llama()
    steps = attach(model)
    forward = type(model).forward

    def noting(*args, **kwargs):
        found.append(compiled.cache_info().currsize)
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model), "forward", noting)
    model.generate(**prompts(), **OPTIONS)
    assert set(found) == {len(KERNELS)}
    assert steps.warm_up.seconds > 0
    assert set(VALUES) >= {model.dtype}
