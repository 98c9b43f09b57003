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
