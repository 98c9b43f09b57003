"""Captures of graphs, with a stand-in for CUDA: on which stream they run, and what one that fails leaves behind."""

import pytest
import torch
from test_replay import Cuda

from tide_hf.steps import replay

DEVICE = torch.device("cuda:0")


@pytest.fixture
def counter():
    return torch.zeros((), dtype=torch.int64)


@pytest.fixture(autouse=True)
def _no_streams_are_kept():
    replay._stream_of.cache_clear()
    yield
    replay._stream_of.cache_clear()


def test_a_device_has_one_stream_for_all_that_surrounds_captures(monkeypatch, counter):
    cuda, streams = Cuda(), []
    monkeypatch.setattr(replay.torch, "cuda", cuda)

    def function():
        streams.append(cuda.current_stream())
        counter.add_(1)

    for _ in range(2):
        assert replay.replay_of(function, [counter], DEVICE).refused is None
    assert len(streams) == 2 * (replay.WARM_UPS + 2)
    assert set(streams) == {replay._stream_of(DEVICE)}


@pytest.fixture
def allocator(monkeypatch):
    """What the allocator is told, as PyTorch with CUDA tells it."""
    told = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: told.append((name, *args)), raising=False)
    return told


@pytest.mark.parametrize("earlier", [None, (0, 99)])
def test_an_end_that_fails_is_cleared_up(monkeypatch, counter, allocator, earlier):
    cuda = Cuda("operation failed due to a previous error during capture")
    monkeypatch.setattr(replay.torch, "cuda", cuda)

    def function():
        counter.add_(1)
        if cuda.captured_on:
            raise RuntimeError("operation not permitted\nwhile capturing")

    found = replay.replay_of(function, [counter], DEVICE, earlier)
    assert found.refused == "operation not permitted"
    pool = earlier or (0, 1)
    assert allocator == [("_cuda_endAllocateToPool", 0, pool), ("_cuda_releasePool", 0, pool)]
    assert len(cuda.captured_on) == 2  # the second makes random numbers possible again
    assert pool not in cuda.pools[-1:]
    assert found.pool is None
    assert cuda.current is cuda.outer
    assert counter == 0


@pytest.mark.parametrize("earlier", [None, (0, 99)])
def test_a_failure_behind_which_the_capture_ends_leaves_the_pool_to_others(monkeypatch, counter, allocator, earlier):
    cuda = Cuda()
    monkeypatch.setattr(replay.torch, "cuda", cuda)

    def function():
        if cuda.captured_on:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors")

    found = replay.replay_of(function, [counter], DEVICE, earlier)
    assert found.refused == "Cannot copy between CPU and CUDA tensors"
    assert found.pool == earlier
    assert allocator == []
    assert len(cuda.captured_on) == 1


def test_a_pool_that_was_not_recorded_to_is_not_released(monkeypatch, counter, allocator):
    def refuse(*_):
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(replay.torch, "cuda", Cuda("invalid", times=2))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    assert replay.replay_of(lambda: counter.add_(1), [counter], DEVICE, (0, 99)).pool is None
    assert allocator == []
