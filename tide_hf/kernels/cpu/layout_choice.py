"""Measure, at first use, which weight layout is the fastest on this machine for a number of rows."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

from ...common.timing import least_seconds
from .weight_layouts import PYTORCH_LAYOUTS, WeightLayout

PROBED_ROWS = (1, 2, 4, 8, 16, 64, 128, 256, 1024)  # a measurement holds up to the next of these
PROBED_SIZE, PROBED_WEIGHTS = 1024, 16  # together larger than a core's caches
FEW_WEIGHTS, COMPUTE_BOUND_ROWS = 4, 64  # compute-bound from so many rows on, so fewer weights suffice
MANY_ROWS = 256
COPY_GAIN = 1.12  # least speed-up of a copy: it takes memory, and gains less on weights smaller than the probe's
COMPUTE_BOUND_GAIN = 1.12  # least speed-up where compute-bound: layouts differ by little more than noise there
CLEAR_GAIN = 1.5
REPEATS = 2

# Seconds, by layout (`None` is PyTorch's linear), dtype, threads and one of PROBED_ROWS.
_measured: dict[tuple[type[WeightLayout] | None, torch.dtype, int, int], float] = {}


def fastest_layout(dtype: torch.dtype, rows: int, layouts: tuple[type[WeightLayout], ...]) -> type[WeightLayout] | None:
    """The fastest of `layouts` for a number of rows; `None` if PyTorch's linear is the fastest. Measured once."""
    if type(rows) is not int:  # a symbolic size of a trace cannot be a cache key
        return _fastest_layout.__wrapped__(dtype, rows, layouts, 0)
    return _fastest_layout(dtype, rows, layouts, torch.get_num_threads())


@lru_cache(maxsize=1024)  # called for every linear layer of every pass
def _fastest_layout(
    dtype: torch.dtype, rows: int, layouts: tuple[type[WeightLayout], ...], _threads: int
) -> type[WeightLayout] | None:
    if rows < PROBED_ROWS[0]:
        return None
    probed = max(known for known in PROBED_ROWS if known <= rows)
    among = [None, *[layout for layout in layouts if layout.serves(dtype, rows)]]
    if len(among) == 1:
        return None
    return min(among, key=lambda layout: _seconds_of(layout, dtype, probed) * _required_gain(layout, probed))


def _required_gain(layout: type[WeightLayout] | None, rows: int) -> float:
    """The speed-up over PyTorch's linear from which on a layout is chosen."""
    if layout is None:
        return 1.0
    return (COPY_GAIN if layout.is_copy else 1.0) * (COMPUTE_BOUND_GAIN if rows >= COMPUTE_BOUND_ROWS else 1.0)


def _seconds_of(layout: type[WeightLayout] | None, dtype: torch.dtype, rows: int) -> float:
    key = layout, dtype, torch.get_num_threads(), rows
    if key not in _measured:
        _measured[key] = _measure(layout, dtype, rows)
    return _measured[key]


@torch.inference_mode(False)  # inference tensors have no versions
@torch.no_grad()
def _measure(layout: type[WeightLayout] | None, dtype: torch.dtype, rows: int) -> float:
    count = PROBED_WEIGHTS if rows < COMPUTE_BOUND_ROWS else FEW_WEIGHTS
    weights = [torch.full((PROBED_SIZE, PROBED_SIZE), 0.5, dtype=dtype, device="cpu") for _ in range(count)]
    input = torch.full((rows, PROBED_SIZE), 0.5, dtype=dtype, device="cpu")
    if layout is None:
        return least_seconds(lambda: [functional.linear(input, weight) for weight in weights], REPEATS)
    taken = [layout(weight) for weight in weights]
    return least_seconds(lambda: [one.apply(input, None) for one in taken], REPEATS)


def clearly_faster_layout(dtype: torch.dtype) -> type[WeightLayout] | None:
    """The layout that needs no compiler and is clearly faster for many rows, if any.

    Prepacked weights are, on CPUs that MKL is not tuned for; upcast weights are, on CPUs without instructions for the
    dtype. The clear margin keeps results from depending on the noise of a measurement.
    """
    for layout in PYTORCH_LAYOUTS:
        if layout.serves(dtype, MANY_ROWS):
            plain, other = (_seconds_of(one, dtype, MANY_ROWS) for one in (None, layout))
            return layout if other * CLEAR_GAIN < plain else None
    return None
