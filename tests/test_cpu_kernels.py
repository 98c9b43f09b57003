"""Kernels for CPUs: which there are, and that they are compiled at the same time but loaded one after the other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._inductor.codecache import CppCodeCache

from tide_hf.cpu import kernels
from tide_hf.cpu.kernels import KERNELS, compiled

WAIT_SECONDS = 30

pytestmark = pytest.mark.usefixtures("fresh_kernels")


def test_each_file_is_a_kernel():
    assert {path.stem for path in Path(kernels.__file__).parent.glob("*.cpp")} == set(KERNELS)


def test_the_first_has_all_compiled_at_the_same_time(monkeypatch):
    together, loaded = threading.Barrier(len(KERNELS), timeout=WAIT_SECONDS), []
    futures = []

    def compiling(text, device_type, submit_fn):
        futures.append(submit_fn(together.wait))

    monkeypatch.setattr(CppCodeCache, "load_async", compiling)
    monkeypatch.setattr(CppCodeCache, "load", lambda text, device_type: loaded.append(text))
    compiled(KERNELS[-1], torch.bfloat16)
    assert len(loaded) == 1
    assert sorted(future.result() for future in futures) == list(range(len(KERNELS)))


def test_no_two_threads_load_at_once(monkeypatch):
    busy, together = threading.Lock(), threading.Barrier(len(KERNELS), timeout=WAIT_SECONDS)
    alone = []

    def loading(text, device_type):
        alone.append(busy.acquire(blocking=False))
        threading.Event().wait(0.05)  # in which another would come
        busy.release()

    def ask(name):
        together.wait()
        return compiled(name, torch.float32)

    monkeypatch.setattr(CppCodeCache, "load_async", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(CppCodeCache, "load", loading)
    with ThreadPoolExecutor(len(KERNELS)) as pool:
        names = list(pool.map(ask, KERNELS))
    assert alone == [True] * len(KERNELS)
    assert names == [f"{name}_float" for name in KERNELS]


def test_one_that_cannot_be_compiled_leaves_the_others(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "KERNELS", (*KERNELS, "broken"))
    source = kernels._source
    monkeypatch.setattr(
        kernels, "_source", lambda name, dtype: ("broken", "int 1;") if name == "broken" else source(name, dtype)
    )
    assert compiled("stored_rows", torch.float32) == "stored_rows_float"
    assert "cannot be compiled" not in caplog.text
    assert compiled("broken", torch.float32) is None
    assert "PyTorch's own operations do what broken.cpp does, which cannot be compiled" in caplog.text
