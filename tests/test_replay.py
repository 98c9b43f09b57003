"""What surrounds the capture of a graph, with a stand-in for CUDA, and what waits; on a GPU see test_gpu.py."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from tide_hf.engines.steps import replay


class Stream:
    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        pass


class Graph:
    def __init__(self):
        self.used_pool = None

    def pool(self):
        if self.used_pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.used_pool


class Cuda:
    """The part of `torch.cuda` that captures, where nothing is captured: what runs then is counted.

    Args:
        refuses: What the end of a capture says; it then leaves its stream in place, as PyTorch's does.
        times: That it says so.
    """

    CUDAGraph = Graph
    Stream = Stream
    device = nullcontext

    def __init__(self, refuses=None, times=1):
        self.refuses, self.times, self.outer = refuses, times, Stream()
        self.current, self.captured_on, self.pools = self.outer, [], []
        self.cleared: list[int] = []  # captures that had ended whenever cuBLAS gave its working memory back

    def play(self, monkeypatch):
        """Take the place of PyTorch's."""
        monkeypatch.setattr(replay.torch, "cuda", self)
        clear = "_cuda_clearCublasWorkspaces"
        monkeypatch.setattr(torch._C, clear, lambda: self.cleared.append(len(self.captured_on)), raising=False)
        return self

    def current_stream(self):
        return self.current

    def graph_pool_handle(self):
        self.pools.append((0, len(self.pools) + 1))
        return self.pools[-1]

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        before, self.current = self.current, stream
        self.captured_on.append(stream)
        graph.replay = lambda: None
        try:
            yield
        finally:
            if self.refuses and self.times:
                self.times -= 1
                raise RuntimeError(self.refuses)
            graph.used_pool, self.current = pool, before


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
