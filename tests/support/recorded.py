"""Operations recorded as they run, and replayed without their Python code: a stand-in on the CPU for CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
import transformers.masking_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tide_hf.engines.steps.capture import HostReads, Replay, restorer

COPIES = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Recording(TorchDispatchMode):
    """Records operations, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.found: Any = None
        self.copies_from_host = False  # whether a tensor was made of host numbers, which CUDA refuses to capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        self.copies_from_host |= func is torch.ops.aten.lift_fresh.default
        return output

    @property
    def launches(self) -> int:
        """Number of operations other than views: each would launch at least one kernel."""
        return sum(not _is_view(func) for func, *_ in self.calls)

    def replay(self) -> Any:
        with torch.no_grad():
            for func, args, kwargs, output in self.calls:
                again = func(*args, **kwargs)
                if _writes_new(func):
                    for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                        if isinstance(old, torch.Tensor):
                            old.copy_(new)
        return self.found


class Recorder:
    """Stands in for `capture.capture`.

    Args:
        may_copy: Whether tensors may be made of numbers on the host, as some models do unless they are compiled.

    Attributes:
        recordings: Recordings of the captured steps.
        function_calls: Times that a step's own code ran.
    """

    def __init__(self, may_copy: bool = False) -> None:
        self.may_copy = may_copy
        self.recordings: list[Recording] = []
        self.function_calls = 0

    def __call__(self, function: Any, state: list, device: Any, pool: Any) -> Replay:
        put_back = restorer(state)
        recording, reads = Recording(), HostReads(device)
        is_tracing = transformers.masking_utils.is_tracing
        transformers.masking_utils.is_tracing = lambda *_: True  # as during the capture of a stream
        try:
            with reads, recording:
                recording.found = function()
        finally:
            transformers.masking_utils.is_tracing = is_tracing
        self.function_calls += 1
        put_back()
        if reads.found is not None:
            return Replay(function, refused=f"its forward needs the host ({reads.found})")
        if recording.copies_from_host and not self.may_copy:
            return Replay(function, refused=COPIES)
        self.recordings.append(recording)
        return Replay(recording.replay)


def as_it_is(function: Any, state: list, device: Any, pool: Any) -> Replay:
    """Stand in for `capture.capture`: each replay runs the function itself, Python code included."""
    return Replay(function)


def _writes_new(func: Any) -> bool:
    return all(value.alias_info is None for value in func._schema.returns)


def _is_view(func: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


class KeyHeads(TorchDispatchMode):
    """Records the numbers of K heads that masked attention gets."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_masked = func.overloadpacket is KERNEL and kwargs.get("attn_mask") is not None
        if is_masked or func.name().split(".")[0].endswith(("::attend_filled", "::decode_attention")):
            self.found.add(args[1].shape[1])
        return func(*args, **(kwargs or {}))
