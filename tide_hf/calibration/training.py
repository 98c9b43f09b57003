"""Fit the exit heads in closed form, then train the routers that predict where those heads are right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..modeling_tide import ExitRouter
from ..unembed import Unembed

RIDGE_PENALTIES = (1e-3, 1e-2, 1e-1)  # in units of each input's variance
EPOCHS, ROWS_PER_STEP, LEARNING_RATE, WEIGHT_DECAY = 30, 512, 1e-3, 1e-2


class Moments:
    """First and second moments of (input state, target state), enough to solve any ridge regression between them.

    They are sums of differences to the first batch's mean, since hidden states have a few entries so large that
    sums of their squares would drown the others in float32.

    Args:
        hidden_size: Width D of the states.
    """

    def __init__(self, hidden_size: int) -> None:
        self.weight = 0.0
        self.origin: tuple[Tensor, Tensor] | None = None
        self.sum_x = torch.zeros(hidden_size, dtype=torch.float64)
        self.sum_y = torch.zeros(hidden_size, dtype=torch.float64)
        self.sum_xx = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)
        self.sum_xy = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)

    def add(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> None:
        """Take in N positions.

        Args:
            inputs: (N, D) float32.
            targets: (N, D) float32.
            weights: (N,) float32.
        """
        if self.origin is None:
            self.origin = inputs.mean(dim=0), targets.mean(dim=0)
        x, y = inputs - self.origin[0], targets - self.origin[1]
        weighted = x * weights[:, None]
        self.weight += float(weights.sum())
        self.sum_x += weighted.sum(dim=0).cpu()
        self.sum_y += (y * weights[:, None]).sum(dim=0).cpu()
        self.sum_xx += (weighted.T @ x).cpu()
        self.sum_xy += (weighted.T @ y).cpu()

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Solve for the translator `y = x + A x + b` with the least squared error.

        Args:
            penalty: Ridge penalty on A, in units of each input's variance.

        Returns:
            A (D, D) and b (D,), float32.
        """
        mean_x, mean_y = self.sum_x / self.weight, self.sum_y / self.weight
        covariance = self.sum_xx / self.weight - torch.outer(mean_x, mean_x)
        cross = self.sum_xy / self.weight - torch.outer(mean_x, mean_y)
        variance = covariance.diagonal().clamp_min(1e-12)
        solution = torch.linalg.solve(covariance + torch.diag(penalty * variance), cross - covariance).T
        origin_x, origin_y = (origin.double().cpu() for origin in self.origin)  # type: ignore[union-attr]
        mean_x, mean_y = mean_x + origin_x, mean_y + origin_y
        return solution.float(), (mean_y - mean_x - solution @ mean_x).float()
