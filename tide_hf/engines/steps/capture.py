"""Capture functions on tensors at fixed addresses as CUDA graphs, and make a model's forward capturable.

During a capture, the host must neither read values from the device nor make device tensors from numbers on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from threading import Lock
from types import FrameType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from ...common.errors import first_line
from ..gqa_attention import gqa_attention
from .step_tensors import WIDEST

WARM_UPS = 2  # runs in which libraries choose kernels and allocate workspaces
aten = torch.ops.aten
HOST_READS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal, aten.bincount)
UNIQUE = (aten._unique2, aten.unique_consecutive, aten.unique_dim)
INDEXING = (aten.index, aten.index_put, aten.index_put_)
# Without cuDNN, which PyTorch prefers on Hopper, and which builds a plan for every new shape.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# Older versions of transformers make masks for eager attention from a number on the host, which capture forbids.
HAS_CAPTURABLE_MASKS = Version(transformers.__version__) >= Version("5.22")


@dataclass
class Replay:
    """A function that can run many times, directly or as a CUDA graph."""

    run: Callable[[], Any]  # the function, or the replay of its graph; the next run may overwrite the result
    pool: Any = None  # memory pool that graphs share
    refused: str | None = None  # why the function was not compiled or captured; `None` on success
    may_do_later: bool = False  # whether capture failed for a temporary reason, such as lack of memory
    references: Any = None  # objects that must live as long as the replay


class HostReads(TorchDispatchMode):
    """Records the first operation that synchronises the host with a device, or has a data-dependent shape."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and check it."""
        kwargs = kwargs or {}
        if self.found is None and self._waits(func, args, kwargs) and not _in_masking(sys._getframe(1)):
            self.found = str(func.overloadpacket)
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        packet = func.overloadpacket
        if packet in (*HOST_READS, *UNIQUE):
            return bool(args[0].device.type == self.device.type)
        if packet in INDEXING:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if packet is aten.repeat_interleave:
            return kwargs.get("output_size") is None and "self_int" not in func._overloadname
        if packet is aten._to_copy:
            target = kwargs.get("device")
            return target is not None and target.type != args[0].device.type
        return packet is aten.copy_ and args[0].device.type != args[1].device.type


def _in_masking(frame: FrameType | None) -> bool:
    """Whether an operation comes from transformers' mask code, which skips operations that synchronise in a capture."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "transformers.masking_utils":
            return True
        if name.startswith("tide_hf.") and name != __name__:
            return False
        frame = frame.f_back
    return False


def restorer(state: list[Tensor]) -> Callable[[], None]:
    """Save the values of tensors; return a function that restores them."""
    before = [tensor.clone() for tensor in state]

    def restore() -> None:
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)

    return restore


_capturing = Lock()  # another thread's work on the stream would be captured as well


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device, which share memory; PyTorch's own capture stream is on one device only.

    Warm-up runs use this stream too, since cuBLAS keeps a workspace for every stream.
    """
    return torch.cuda.Stream(device)


def capture(function: Callable[[], Any], state: list[Tensor], device: torch.device, pool: Any = None) -> Replay:
    """Capture a function in a CUDA graph; if that fails, return a `Replay` that runs the function and says why.

    The function reads and writes tensors at fixed addresses; tensors in `state` are restored after trial runs. `pool`
    is the memory pool that the graph shares with other graphs.
    """
    restore = restorer(state)
    with _capturing, torch.cuda.device(device):
        reads, stream = HostReads(device), _stream_of(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
                restore()
            with reads:
                function()
            restore()
        torch.cuda.current_stream().wait_stream(stream)
        if reads.found is not None:
            return Replay(function, pool, f"its forward needs the host ({reads.found})")
        graph = torch.cuda.CUDAGraph()
        own_pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        try:
            with _recording(graph, own_pool, stream):
                found = function()
        except RuntimeError as error:  # from CUDA: an operation that capture does not allow
            try:
                graph.pool()  # raises unless the capture ended properly
            except RuntimeError:
                _clear_up(device, own_pool, restore)
                pool = None
            restore()
            before = error.__context__  # more specific than the error at the end of the capture
            reason = before if isinstance(before, Exception) else error
            is_full = isinstance(reason, torch.OutOfMemoryError)
            return Replay(function, pool, first_line(reason), may_do_later=is_full)

    def replay() -> Any:
        graph.replay()
        return found

    return Replay(replay, own_pool)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    # At every replay a graph uses the cuBLAS workspace of its capture, so nothing else may use or free that workspace.
    # Workspaces are cleared before the capture, so that cuBLAS allocates a new one, and after it, so that later calls
    # allocate their own. The outer stream context restores the current stream even if ending the capture fails.
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
    """Clean up after a capture that could not be ended; PyTorch does not. `function` can be any capturable function.

    The pool is not reused, since PyTorch 2.11 still allocates pinned memory for it.
    """
    with suppress(RuntimeError):  # without this, every allocation would query the lost graph
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)  # decrements a count, so run only if the line above succeeded
    other = _recording(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), _stream_of(device))
    with suppress(RuntimeError), other:  # without this, drawing random numbers would raise until another capture ends
        function()


@contextmanager
def capturable_forward(model: Any, tokens: int) -> Iterator[None]:
    """Make a model's forward capturable, for a step of `tokens` tokens; this changes results by rounding alone.

    Mixtures of experts run as when `generate` decodes on GPUs, with a copy of expert weights for each token. In
    bfloat16, steps of more than `WIDEST` tokens use grouped products instead, which need the host in other dtypes.
    """
    with ExitStack() as changes:
        if not HAS_CAPTURABLE_MASKS:
            changes.enter_context(_masks_made_on_the_device())
        if tokens <= WIDEST or model.dtype != torch.bfloat16:
            changes.enter_context(model._optimize_model_for_decode())
        changes.enter_context(gqa_attention(model, may_use_kernels=False, cpu_only=False))
        changes.enter_context(sdpa_kernel(ATTENTION_BACKENDS))
        yield


def eager_mask(*, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """Make the same mask as transformers' `eager_mask`, on the device alone."""
    may_attend = sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})
    if may_attend is None:
        return None
    return torch.where(may_attend, may_attend.new_zeros((), dtype=dtype), torch.finfo(dtype).min)


@contextmanager
def _masks_made_on_the_device() -> Iterator[None]:
    """Make the masks of eager attention by [`eager_mask`], in all threads."""
    before = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = eager_mask
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS["eager"] = before
