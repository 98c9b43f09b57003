"""What surrounds the capture of a graph, with a stand-in for CUDA, and what waits; on a GPU see test_gpu.py."""

import pytest
import torch
from replays import Cuda

from tide_hf.engines.steps import replay


@pytest.fixture
def counter():
    return torch.zeros((), dtype=torch.int64)


def replayed(monkeypatch, cuda, counter, device="cuda:0"):
    cuda.play(monkeypatch)
    return replay.replay_of(lambda: counter.add_(1), [counter], torch.device(device))


def test_a_capture_that_fails_gives_the_stream_and_the_state_back(monkeypatch, counter):
    cuda = Cuda("operation not permitted\nwhile capturing")
    found = replayed(monkeypatch, cuda, counter)
    assert found.refused == "operation not permitted"
    assert cuda.current is cuda.outer
    assert counter == 0
    found.run()
    assert counter == 1


def test_each_device_captures_on_a_stream_of_its_own(monkeypatch, counter):
    replay._stream_of.cache_clear()
    cuda = Cuda()
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        assert replayed(monkeypatch, cuda, counter, device).refused is None
    replay._stream_of.cache_clear()
    assert [str(stream.device) for stream in cuda.captured_on] == ["cuda:0", "cuda:1", "cuda:0"]
    assert cuda.captured_on[0] is cuda.captured_on[2]
    assert cuda.current is cuda.outer


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: x.nonzero(), True),
        (lambda x: x[x > 0], True),
        (lambda x: x.index_put_((x > 0,), torch.ones(())), True),
        (lambda x: torch.equal(x, x), True),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2])), True),
        (lambda x: x.repeat_interleave(2), False),
        (lambda x: torch.where(x > 0, x, 0).index_copy_(0, torch.tensor([1]), x[:1]), False),
        (lambda x: x.to("meta"), True),
    ],
)
def test_what_makes_the_host_wait(function, waits):
    with replay.HostReads(torch.device("cpu")) as reads:
        function(torch.tensor([1.0, -1.0]))
    assert (reads.found is not None) == waits
