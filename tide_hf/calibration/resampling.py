"""Intervals by resampling items: documents, or prompts. Tokens of one item are not independent; items are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000
RESAMPLED_AT_ONCE = 2**20  # items, all resamples together: 8 MB a column
ROUNDING = 1e-9  # by how much, relatively, sums of the same values may differ in another order

Sums = Mapping[str, Tensor]


def resampled_sums(values: Tensor, seed: int = 0) -> Tensor:
    """(items, columns) -> (RESAMPLES, columns), sums over as many items, drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    count = len(values)
    at_once = max(1, RESAMPLED_AT_ONCE // count)
    parts = [min(at_once, RESAMPLES - start) for start in range(0, RESAMPLES, at_once)]
    return torch.cat([values[torch.randint(count, (part, count), generator=generator)].sum(dim=1) for part in parts])


class Bootstrap:
    """Percentile bootstrap of figures that are functions of sums over items.

    All figures see the same resamples, so a difference of two columns is that of paired items.

    Args:
        columns: By name, (items,) what each item adds to the sums.
        confidence: In (0, 1).
        seed: Of the resampling.
    """

    def __init__(self, columns: Mapping[str, Tensor], confidence: float, seed: int = 0) -> None:
        names, values = list(columns), torch.stack([column.double() for column in columns.values()], dim=1)
        self.count = len(values)
        self.miss = (1 - confidence) / 2
        self._totals = dict(zip(names, values.sum(dim=0), strict=True))
        self._resampled = dict(zip(names, resampled_sums(values, seed).unbind(dim=1), strict=True))

    def figure(self, statistic: Callable[[Sums], Tensor], limits: tuple[float, float] | None = None) -> dict[str, Any]:
        """Compute a figure and its interval.

        Where all resamples give the same, resampling would claim to be certain. A figure that one item in n moves by at
        most 1/n then gets the interval of Clopper and Pearson for n items none of which is different.

        Args:
            statistic: From the sums of all columns to the figure; elementwise, since it sees many resamples at once.
            limits: The least and greatest values of such a figure, a share or a difference of shares. `None` for
                figures without, such as a perplexity: where nothing varies they have no interval.

        Returns:
            "value", and "interval": lower and upper end, or `None`.
        """
        value, resampled = float(statistic(self._totals)), statistic(self._resampled)
        lower, upper = resampled.quantile(torch.tensor([self.miss, 1 - self.miss], dtype=torch.float64)).tolist()
        if torch.allclose(resampled, resampled[:1], rtol=ROUNDING, atol=ROUNDING):
            if limits is None:
                return {"value": value, "interval": None}
            slack = 1 - self.miss ** (1 / self.count)
            lower, upper = max(limits[0], value - slack), min(limits[1], value + slack)
        return {"value": value, "interval": [lower, upper]}
