"""What stages of a calibration need to draw random numbers, and to train: precision, and the loop over epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from time import perf_counter
from typing import TypeVar

import torch

from ..common.timing import least_seconds

SIZE, REPEATS = 1024, 3  # matrix size and number of runs of the timed product
MIN_SPEEDUP = 1.5  # speed-up over float32 from which on bfloat16 is worth its rounding errors
WARMUP_STEPS = 20

Batch = TypeVar("Batch")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers on the CPU and on `device` from `seed`; those of the caller stay as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 autocast for a training step's forward pass, if faster; weights and gradients stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=gains_by_bfloat16(device.type))


@lru_cache
@torch.inference_mode()
def gains_by_bfloat16(device_type: str) -> bool:
    """Whether bfloat16 matrix products are clearly faster than float32; a CPU is timed once per process."""
    if device_type != "cpu":
        return device_type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return _seconds(torch.bfloat16) * MIN_SPEEDUP < _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    factor = torch.full((SIZE, SIZE), 0.5, dtype=dtype)
    return least_seconds(lambda: factor @ factor, REPEATS)


def train_epochs(
    optimizer: torch.optim.Optimizer,
    step: Callable[[Batch, float], float],
    batches: Callable[[], Iterable[Batch]],
    num_batches: int,
    epochs: int,
    *,
    floor: float,
    deadline: float,
) -> Iterator[tuple[int, float]]:
    """Train for `epochs`, or until `deadline` (in `perf_counter` seconds).

    The learning rates start from those of the optimizer, warm up, and follow a cosine down to `floor` times as much,
    over the steps or the time, whichever ends first. `step` trains on a batch, given the share of the training that is
    over, and returns the loss; `batches` gives the batches of the next epoch, `num_batches` in number.

    Yields (steps so far, mean loss) of each epoch.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    started, count = perf_counter(), 0
    available = deadline - started
    for _ in range(epochs):
        losses = []
        for batch in batches():
            spent = (perf_counter() - started) / available if 0.0 < available < math.inf else 0.0
            progress = min(1.0, max(count / (epochs * num_batches), spent))
            cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * min(1.0, (count + 1) / WARMUP_STEPS) * cosine
            losses.append(step(batch, progress))
            count += 1
            if perf_counter() > deadline:
                break
        yield count, sum(losses) / max(1, len(losses))
        if perf_counter() > deadline:
            break
