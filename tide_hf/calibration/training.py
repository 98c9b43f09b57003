"""The mathematics of heads and routers: ridge regression from moments, router training, and how good scores are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..routers.exit_points import ExitRouter

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

    def solve(self, penalty: float, rank: int | None = None) -> tuple[Tensor, ...]:
        """Solve for the translator `y = x + A x + b` with the least squared error.

        Args:
            penalty: Ridge penalty on A, in units of each input's variance.
            rank: Of A; `None` is full.

        Returns:
            A (D, D) and b (D,), float32; with a rank, A in two factors: (rank, D), (D, rank) and b. Of all matrices of
            that rank theirs is the one whose outputs are nearest to those of the full solution.
        """
        mean_x, mean_y = self.sum_x / self.weight, self.sum_y / self.weight
        covariance = self.sum_xx / self.weight - torch.outer(mean_x, mean_x)
        cross = self.sum_xy / self.weight - torch.outer(mean_x, mean_y)
        variance = covariance.diagonal()
        variance = variance.clamp_min(max(1e-6 * float(variance.mean()), 1e-12))
        solution = torch.linalg.solve(covariance + torch.diag(penalty * variance), cross - covariance).T
        factors: tuple[Tensor, ...] = (solution,)
        if rank is not None:
            directions = torch.linalg.eigh(solution @ covariance @ solution.T).eigenvectors[:, -rank:]
            factors = (directions.T @ solution, directions)
            solution = directions @ factors[0]
        origin_x, origin_y = (origin.cpu().double() for origin in self.origin)  # type: ignore[union-attr]
        mean_x, mean_y = mean_x + origin_x, mean_y + origin_y
        return *(factor.float() for factor in factors), (mean_y - mean_x - solution @ mean_x).float()


def train_router(
    router: ExitRouter, fit: tuple[Tensor, Tensor], tune: tuple[Tensor, Tensor], seed: int
) -> dict[str, float]:
    """Train `router` in place to score how likely the exit head is right.

    Binary cross-entropy on standardised states; the standardisation is folded into the weights at the end. After each
    epoch Platt scaling on `tune` turns scores into probabilities, and the epoch is kept whose probabilities are best
    there: an epoch that ranks well but is too sure of itself loses nothing.

    Args:
        router: Fresh, in float32.
        fit: States after the final norm (N, D) in float32, and whether the head agrees (N,).
        tune: The same, of other documents.
        seed: Of the weights and the order of the positions.

    Returns:
        `epoch` that was kept, and on `tune` its `log_loss` and `expected_calibration_error`.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, std = fit[0].mean(dim=0), fit[0].std(dim=0, correction=0)
    std = std.clamp_min(1e-3 * float(std.mean()) + 1e-8)
    bound = fit[0].shape[1] ** -0.5
    with torch.no_grad():
        for parameter, limit in ((router.down.weight, bound), (router.down.bias, bound), (router.up.weight, 0.05)):
            parameter.copy_(torch.empty(parameter.shape).uniform_(-limit, limit, generator=generator))
        router.up.bias.zero_()
    states, labels = (fit[0] - mean) / std, fit[1].float()
    tune_states, tune_labels = (tune[0] - mean) / std, tune[1].cpu()
    optimizer = torch.optim.AdamW(router.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best: dict[str, float] = {}
    scaling, kept = (1.0, 0.0), router.state_dict()
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(labels), generator=generator).to(states.device).split(ROWS_PER_STEP):
            loss = nn.functional.binary_cross_entropy_with_logits(router.logits(states[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            logits = router.logits(tune_states).cpu()  # float64 is not to be had on every device
        found = platt_scaling(logits, tune_labels)
        figures = _router_figures(found[0] * logits + found[1], tune_labels)
        if not best or figures["log_loss"] < best["log_loss"]:
            best, scaling = {"epoch": epoch, **figures}, found
            kept = {name: value.clone() for name, value in router.state_dict().items()}
    router.load_state_dict(kept)
    with torch.no_grad():
        router.up.weight.mul_(scaling[0])
        router.up.bias.mul_(scaling[0]).add_(scaling[1])
        router.down.weight.div_(std)
        router.down.bias.sub_(router.down.weight @ mean)
    return best


def _router_figures(logits: Tensor, labels: Tensor) -> dict[str, float]:
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    return {
        "log_loss": float(loss),
        "expected_calibration_error": expected_calibration_error(torch.sigmoid(logits), labels),
    }


def platt_scaling(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Find (a, c) so that `sigmoid(a * logits + c)` are probabilities (Platt 1999, with his smoothed targets).

    Args:
        logits: (N,), on the CPU.
        labels: (N,) bool, on the CPU.
    """
    x = logits.double()
    positives, negatives = float(labels.sum()), float((~labels).sum())
    target = torch.where(labels, (positives + 1) / (positives + 2), 1 / (negatives + 2)).double()
    features = torch.stack([x, torch.ones_like(x)], dim=1)
    coefficients = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for _ in range(50):  # Newton's method on a convex function of two numbers
        probability = torch.sigmoid(features @ coefficients)
        gradient = features.T @ (probability - target)
        curvature = features.T @ (features * (probability * (1 - probability))[:, None])
        step = torch.linalg.solve(curvature + 1e-6 * torch.eye(2, dtype=torch.float64), gradient)
        coefficients = coefficients - step.clamp(-1.0, 1.0)
        if float(step.abs().max()) < 1e-9:
            break
    scale, shift = coefficients.tolist()
    return max(scale, 0.0), shift  # a router that is worse than chance must not be turned round


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """Probability that a position that agrees scores higher than one that does not; 0.5 where one kind is missing."""
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if positives == 0 or negatives == 0:
        return 0.5
    _, order, counts = scores.unique(return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2  # ties share their mean rank
    rank_sum = float(mean_rank[order][labels].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def expected_calibration_error(scores: Tensor, labels: Tensor, num_bins: int = 15) -> float:
    """Mean gap between score and share of agreement over bins of equal width, weighted by their size."""
    bins = (scores * num_bins).long().clamp(0, num_bins - 1)
    gaps = torch.bincount(bins, weights=(scores.double() - labels.double()), minlength=num_bins)
    return float(gaps.abs().sum()) / len(scores)
