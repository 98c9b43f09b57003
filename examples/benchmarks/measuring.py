"""Timing in one process: calls take turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from tide_hf.evaluation.benchmark import Result, synchronize
from tide_hf.weights.layouts import StoredWeight
from tide_hf.weights.linear_gate import KERNEL_LAYOUTS, LinearGate, linears_in


def interleaved(calls: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times in turn, after one turn that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + repeats):
        for name, call in calls.items():
            synchronize(device)
            start = perf_counter()
            call()
            synchronize(device)
            if turn:
                seconds[name].append(perf_counter() - start)
    return seconds


class MemoryReads:
    """Reads of a buffer far larger than the caches, on the threads that run the passes.

    Attributes:
        seconds: Of each, so far.
    """

    def __init__(self, megabytes: int, device: torch.device) -> None:
        self.buffer, self.seconds = torch.ones(megabytes * 10**6 // 4, device=device), list[float]()

    def read(self) -> None:
        """Read it all, by a sum."""
        start = perf_counter()
        self.buffer.sum().item()
        self.seconds.append(perf_counter() - start)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"bytes": self.buffer.nbytes, "seconds": self.seconds}


def bytes_read(model: Any) -> int:
    """Bytes of the weights of an attached model's linear layers, as a pass over one token reads them."""
    structure, total = model._tide.structure, 0
    for linear in linears_in(*structure.layers, structure.head):
        gate = linear.__dict__.get("forward")
        stored = gate.prepare(1, KERNEL_LAYOUTS) if isinstance(gate, LinearGate) else None
        if isinstance(stored, StoredWeight):
            total += stored.values.nbytes + stored.scales.nbytes
        else:
            total += getattr(gate, "num_bytes", 0) or linear.weight.nbytes
    return total


def records_of(results: Iterable[Result]) -> list[dict[str, Any]]:
    """What `compare` found, ready for JSON."""
    return [result.to_dict() for result in results]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile (by linear interpolation)."""
    tensor = torch.tensor(list(values), dtype=torch.float64)
    low, middle, high = tensor.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {"median": middle, "p10": low, "p90": high}


def paired_speedups(plain: Sequence[float], other: Sequence[float]) -> list[float]:
    """How many times faster than plain decoding, for each pair of runs that took turns."""
    return [one / two for one, two in zip(plain, other, strict=True)]


def result_speedups(plain: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """The same from two `Result.to_dict()` on the same prompts: tokens per second of each pair of runs."""
    found = []
    for base, own in zip(plain["prompts"], other["prompts"], strict=True):
        scale = own["num_new_tokens"] / base["num_new_tokens"]
        found += [scale * ratio for ratio in paired_speedups(base["seconds"], own["seconds"])]
    return found


def in_words(values: Sequence[float], form: str = ".2f") -> str:
    """`1.23 (1.10 to 1.40)`: the median, and from the 10th to the 90th percentile."""
    found = spread(values)
    return f"{found['median']:{form}} ({found['p10']:{form}} to {found['p90']:{form}})"


def median_ms(seconds: Sequence[float]) -> str:
    """The median in milliseconds."""
    return f"{1000 * median(seconds):.1f}"
