"""A machine busy with other programs, on which PyTorch's threads spin while they wait for each other (OpenMP)."""

from __future__ import annotations

import logging
import os
from time import perf_counter

import torch

from .measurements import load_average

CLEAR_GAIN = 1.2  # of one thread over all, from which it is named
SIZE, WEIGHTS, PASSES = 1024, 8, 10  # of products that read 32 MB a pass, as decoding reads weights

logger = logging.getLogger(__name__)
_warned: set[str] = set()


def busy_note(num_threads: int | None = None, gain: float = 0.0) -> str | None:
    """What to do where the load exceeds the cores and PyTorch has several threads; else `None`.

    `num_threads` is by default PyTorch's number; `gain` is how many times as fast one thread was, if measured.
    """
    load, cores = load_average(), os.cpu_count() or 1
    if (num_threads or torch.get_num_threads()) == 1 or load <= cores:
        return None
    found = f"is {gain:.1f} times as fast at present" if gain >= CLEAR_GAIN else "can be several times as fast"
    return (
        f"This machine is busy: its load average is {load:.1f} on {cores} cores. PyTorch's threads spin while they "
        f"wait for each other, so one thread {found}: torch.set_num_threads(1), or --threads 1 on the command line."
    )


def warn_if_busy(num_threads: int | None = None, *, measure: bool = False) -> None:
    """Log [`busy_note`] as a warning, once a process; `measure` times one thread first, for a moment."""
    if "busy" not in _warned and busy_note(num_threads) is not None:
        _warned.add("busy")
        logger.warning("%s", busy_note(num_threads, one_thread_gain() if measure else 0.0))


@torch.inference_mode()
def one_thread_gain() -> float:
    """How many times as fast one thread multiplies as PyTorch's number of threads, which stays as it is."""
    threads, seconds = torch.get_num_threads(), []
    state, weight = torch.full((1, SIZE), 0.5), torch.full((WEIGHTS, SIZE, SIZE), 0.5)
    try:
        for number in (threads, 1):
            torch.set_num_threads(number)
            begin = perf_counter()
            for one in [*weight] * PASSES:
                state @ one
            seconds.append(perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return seconds[0] / seconds[1]
