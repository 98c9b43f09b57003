"""Which form of its weights is the fastest for a product of so many rows on this machine: measured at first use."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

from ...common.timing import least_seconds
from .weight_forms import UNCOMPILED, WeightForm

PROBED_ROWS = (1, 2, 4, 8, 16, 64, 128, 256, 1024)  # what holds for one of them holds up to the next
PROBED_SIZE, PROBED_WEIGHTS = 1024, 16  # together more than a core's caches
FEW_WEIGHTS, COMPUTED_ROWS = 4, 64  # from so many rows on products wait for arithmetic, so fewer weights will do
MANY_ROWS = 256
COPY_GAIN = 1.12  # by which a copy has to be faster: it takes memory, and gains less on smaller weights than are probed
COMPUTED_GAIN = 1.12  # by which any form has to be, for so many rows: forms are close there, and measurements not exact
CLEAR_GAIN = 1.5
REPEATS = 2

# Seconds, by form (`None` is PyTorch's linear), dtype, threads and one of PROBED_ROWS.
_measured: dict[tuple[type[WeightForm] | None, torch.dtype, int, int], float] = {}


def fastest_form(dtype: torch.dtype, rows: int, forms: tuple[type[WeightForm], ...]) -> type[WeightForm] | None:
    """The fastest of `forms` for so many rows on this machine; `None` where PyTorch's linear is. Measured once."""
    if type(rows) is not int:  # a size that a trace leaves open, which is nothing to look up
        return _fastest_form.__wrapped__(dtype, rows, forms, 0)
    return _fastest_form(dtype, rows, forms, torch.get_num_threads())


@lru_cache(maxsize=1024)  # every product of every pass asks
def _fastest_form(
    dtype: torch.dtype, rows: int, forms: tuple[type[WeightForm], ...], _threads: int
) -> type[WeightForm] | None:
    if rows < PROBED_ROWS[0]:
        return None
    probed = max(known for known in PROBED_ROWS if known <= rows)
    among = [None, *[form for form in forms if form.serves(dtype, rows)]]
    if len(among) == 1:
        return None
    return min(among, key=lambda form: _seconds_of(form, dtype, probed) * _gain_asked_of(form, probed))


def _gain_asked_of(form: type[WeightForm] | None, rows: int) -> float:
    """By which it has to be faster than PyTorch's linear."""
    if form is None:
        return 1.0
    return (COPY_GAIN if form.is_copy else 1.0) * (COMPUTED_GAIN if rows >= COMPUTED_ROWS else 1.0)


def _seconds_of(form: type[WeightForm] | None, dtype: torch.dtype, rows: int) -> float:
    key = form, dtype, torch.get_num_threads(), rows
    if key not in _measured:
        _measured[key] = _measure(form, dtype, rows)
    return _measured[key]


@torch.inference_mode(False)  # tensors made in it have no versions
@torch.no_grad()
def _measure(form: type[WeightForm] | None, dtype: torch.dtype, rows: int) -> float:
    count = PROBED_WEIGHTS if rows < COMPUTED_ROWS else FEW_WEIGHTS
    weights = [torch.full((PROBED_SIZE, PROBED_SIZE), 0.5, dtype=dtype, device="cpu") for _ in range(count)]
    input = torch.full((rows, PROBED_SIZE), 0.5, dtype=dtype, device="cpu")
    if form is None:
        return least_seconds(lambda: [functional.linear(input, weight) for weight in weights], REPEATS)
    taken = [form(weight) for weight in weights]
    return least_seconds(lambda: [one.apply(input, None) for one in taken], REPEATS)


def clearly_faster_form(dtype: torch.dtype) -> type[WeightForm] | None:
    """The form that needs no compiler, where products over many rows take clearly less time with it than with none.

    So it is with packed weights on CPUs that MKL is not made for, and with widened ones on those that lack instructions
    for the dtype. It is asked where results may not depend on which of two forms was measured as the faster by chance.
    """
    for form in UNCOMPILED:
        if form.serves(dtype, MANY_ROWS):
            plain, other = (_seconds_of(one, dtype, MANY_ROWS) for one in (None, form))
            return form if other * CLEAR_GAIN < plain else None
    return None
