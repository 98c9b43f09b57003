"""A function on tensors that stay where they are, made ready to run again: as a CUDA graph, or as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...common.errors import first_line

WARM_UPS = 2  # in which libraries choose kernels and take their working memory
HOST_READS = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.equal,
    torch.ops.aten._unique2,
    torch.ops.aten.unique_consecutive,
    torch.ops.aten.unique_dim,
    torch.ops.aten.bincount,
)
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


class Replay:
    """Runs a function as it is; `run` returns what the function does, which the next run may write over.

    Args:
        function: The function.
        pool: Memory that graphs share, for the next one.
        refused: Why there is no graph; `None` where there is one, or none was asked for.
        kept: What has to live as long as this does.
        may_do_later: Whether what refused the graph is none of the function's own doing.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        pool: Any = None,
        refused: str | None = None,
        kept: Any = None,
        may_do_later: bool = False,
    ) -> None:
        self.run, self.pool, self.refused, self._kept, self.may_do_later = function, pool, refused, kept, may_do_later


class HostReads(TorchDispatchMode):
    """Notes the first operation that would make the host wait for the device, or make a shape depend on values.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at it."""
        kwargs = kwargs or {}
        if self.found is None and self._waits(func, args, kwargs) and not _in_masking(sys._getframe(1)):
            self.found = str(func.overloadpacket)
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        packet = func.overloadpacket
        if packet in HOST_READS:
            return bool(args[0].device.type == self.device.type)
        if packet in INDEXING:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if packet is torch.ops.aten.repeat_interleave:
            return kwargs.get("output_size") is None and "self_int" not in func._overloadname
        if packet is torch.ops.aten._to_copy:
            target = kwargs.get("device")
            return target is not None and target.type != args[0].device.type
        return packet is torch.ops.aten.copy_ and args[0].device.type != args[1].device.type


def _in_masking(frame: FrameType | None) -> bool:
    """Whether transformers' masks ask, which they leave off while a graph is captured."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "transformers.masking_utils":
            return True
        if name.startswith("tide_hf.") and name != __name__:
            return False
        frame = frame.f_back
    return False


def restorer(state: list[Tensor]) -> Callable[[], None]:
    """Note what tensors hold; return what puts it back into them."""
    before = [tensor.clone() for tensor in state]

    def put_back() -> None:
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)

    return put_back


_capturing = Lock()  # what another thread did on the stream would be captured as well


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """For all captures of a device, since they share memory; PyTorch's own is of the device that captured first.

    What comes before a capture runs there as well: cuBLAS keeps working memory for every stream that it has seen.
    """
    return torch.cuda.Stream(device)


def replay_of(function: Callable[[], Any], state: list[Tensor], device: torch.device, pool: Any = None) -> Replay:
    """Capture a function in a CUDA graph.

    Args:
        function: Reads and writes tensors that stay where they are.
        state: Those of them that it changes so that it could not run again; they are put back.
        device: Where they are, a GPU.
        pool: Memory that it shares with other graphs.

    Returns:
        What runs it; as it is where it cannot be captured, and then with the reason.
    """
    put_back = restorer(state)
    with _capturing, torch.cuda.device(device):
        reads, stream = HostReads(device), _stream_of(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
                put_back()
            with reads:
                function()
            put_back()
        torch.cuda.current_stream().wait_stream(stream)
        if reads.found is not None:
            return Replay(function, pool, f"its forward needs the host ({reads.found})")
        graph = torch.cuda.CUDAGraph()
        own_pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        try:
            with _capture(graph, own_pool, stream):
                found = function()
        except RuntimeError as error:  # of CUDA: something that a capture does not allow
            try:
                graph.pool()  # which a capture has only if its end succeeded
            except RuntimeError:
                _clear_up(device, own_pool, put_back)
                pool = None
            put_back()
            before = error.__context__  # which the end of the capture tells less about
            reason = before if isinstance(before, Exception) else error
            is_full = isinstance(reason, torch.OutOfMemoryError)
            return Replay(function, pool, first_line(reason), may_do_later=is_full)

    def replay() -> Any:
        graph.replay()
        return found

    return Replay(replay, own_pool)


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    # cuBLAS keeps working memory for each stream. A graph goes on using it, so it has to be the graph's own: what was
    # taken before is given back by whoever captures next, as torch.compile's graphs do, and calls must not use this.
    # The outer stream comes back also where the end of a capture fails, which leaves the inner one in place.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _clear_up(device: torch.device, pool: Any, function: Callable[[], Any]) -> None:
    """Do what PyTorch leaves out where the end of a capture fails.

    Args:
        device: The device.
        pool: The capture's. PyTorch 2.11 still takes pinned memory for it, so it serves no other.
        function: Anything that can be captured.
    """
    with suppress(RuntimeError):  # or the allocator would ask the lost graph at each allocation, and keep its memory
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)  # not where the former failed: the count would not be its own
    other = _capture(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), _stream_of(device))
    with suppress(RuntimeError), other:  # or random numbers would be refused until another capture ends
        function()
