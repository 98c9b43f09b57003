"""A stand-in for CUDA's streams and graphs."""

from contextlib import contextmanager, nullcontext

import torch

from tide_hf.engines.steps import capture


class Stream:
    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        pass


class Graph:
    used_pool = None

    def pool(self):
        if self.used_pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.used_pool


class Cuda:
    """A stand-in for the capturing part of `torch.cuda`, which captures nothing and records its calls.

    Args:
        refuses: Error message at the end of a capture, after which its stream stays current, as in PyTorch.
        times: Number of captures that end with this error.
    """

    CUDAGraph = Graph
    Stream = Stream
    device = nullcontext

    def __init__(self, refuses=None, times=1):
        self.refuses, self.times, self.outer = refuses, times, Stream()
        self.current, self.captured_on, self.pools = self.outer, [], []
        self.cleared: list[int] = []  # number of captures so far, at each release of cuBLAS workspaces

    def play(self, monkeypatch):
        """Replace `torch.cuda` in `capture`."""
        monkeypatch.setattr(capture.torch, "cuda", self)
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
