"""Routers: training labels, training by binary cross-entropy with Platt scaling, and exit decisions."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..base_model.unembed import Unembed
from ..routers.exit_points import ExitPoint, ExitRouter
from ..routers.routers import TIDERouters
from .heads import round_weights
from .states import SLICE_ELEMENTS, StateBatch, top_tokens

CONVERGENCE_THRESHOLD = 0.98  # cosine similarity, as in the TIDE paper
# In nats. By Pinsker's inequality, a smaller KL means a total variation distance of at most sqrt(0.1 / 2) = 0.22, so
# rejection sampling accepts at least 78% of the draft tokens of such an exit.
KL_THRESHOLD = 0.1
ARRAYS_PER_LOGIT = 4  # logits and log-probabilities, each of exit head and full model
EPOCHS, ROWS_PER_STEP, LEARNING_RATE, WEIGHT_DECAY = 30, 512, 1e-3, 1e-2


@torch.no_grad()
def router_labels(
    kind: str, unembed: Unembed, head: nn.Module, hidden_states: Tensor, final_states: Tensor, top_tokens: Tensor
) -> Tensor:
    """Labels (N,) bool for router training, on the device of `top_tokens`: whether each position may exit.

    `"agreement"`: the exit head's top token is the full model's. `"cosine"`: the exit layer's state has a cosine
    similarity above `CONVERGENCE_THRESHOLD` with the final state (the TIDE paper's rule; the head is not used). `"kl"`:
    KL(full model || exit head) of the next-token distributions is below `KL_THRESHOLD`.

    States (N, hidden_size) are before the final norm, in the model's dtype; `top_tokens` (N,) are the full model's.
    """
    if kind == "agreement":
        return agreement_labels(unembed, head, hidden_states, top_tokens)
    if kind == "cosine":
        return (cosine_similarity(hidden_states, final_states) > CONVERGENCE_THRESHOLD).to(top_tokens.device)
    return (kl_divergence(unembed, head, hidden_states, final_states) < KL_THRESHOLD).to(top_tokens.device)


@torch.no_grad()
def agreement_labels(unembed: Unembed, head: nn.Module, hidden_states: Tensor, full_model: Tensor) -> Tensor:
    """Whether the exit head and the full model have the same top token (N,), on the device of `full_model` (N,)."""
    return top_tokens(unembed, head(hidden_states)).to(full_model.device) == full_model


def cosine_similarity(hidden_states: Tensor, final_states: Tensor) -> Tensor:
    """Cosine similarity of states, both (N, hidden_size) before the final norm -> (N,) float32, computed in slices."""
    rows = max(1, SLICE_ELEMENTS // hidden_states.shape[-1])
    parts = [
        nn.functional.cosine_similarity(states.float(), final.to(states.device).float(), dim=-1)
        for states, final in zip(hidden_states.split(rows), final_states.split(rows), strict=True)
    ]
    return torch.cat(parts)


@torch.no_grad()
def kl_divergence(unembed: Unembed, head: nn.Module, hidden_states: Tensor, final_states: Tensor) -> Tensor:
    """KL(full model || exit head) of the next-token distributions, (N,) float32 in nats, computed in slices."""
    rows = max(1, SLICE_ELEMENTS // (ARRAYS_PER_LOGIT * unembed.structure.vocab_size))
    divergences = []
    for states, final in zip(hidden_states.split(rows), final_states.split(rows), strict=True):
        exit_head = unembed(head(states)).float().log_softmax(dim=-1)
        full_model = unembed(final.to(states.device)).float().log_softmax(dim=-1)
        gaps = nn.functional.kl_div(exit_head, full_model, reduction="none", log_target=True)
        divergences.append(gaps.sum(dim=-1))
    return torch.cat(divergences)


def train_router(
    router: ExitRouter, fit: tuple[Tensor, Tensor], tune: tuple[Tensor, Tensor], seed: int
) -> dict[str, float]:
    """Train `router` in place, by binary cross-entropy, to predict whether a position may exit.

    `fit` and `tune` are states (N, D) after the final norm, in float32, and labels (N,). States are standardised for
    training; the standardisation is folded into the weights at the end. The epoch with the lowest log loss on `tune` is
    kept, and its figures are returned. Log loss is taken after Platt scaling, so overconfidence does not matter.
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
    scaling, best_weights = (1.0, 0.0), router.state_dict()
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(labels), generator=generator).to(states.device).split(ROWS_PER_STEP):
            loss = nn.functional.binary_cross_entropy_with_logits(router.logits(states[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            logits = router.logits(tune_states).cpu()  # Platt scaling needs float64, which some devices lack
        found = platt_scaling(logits, tune_labels)
        scaled = found[0] * logits + found[1]
        log_loss = float(nn.functional.binary_cross_entropy_with_logits(scaled, tune_labels.to(scaled.dtype)))
        if not best or log_loss < best["log_loss"]:
            calibration_error = expected_calibration_error(torch.sigmoid(scaled), tune_labels)
            best = {"epoch": epoch, "log_loss": log_loss, "expected_calibration_error": calibration_error}
            scaling = found
            best_weights = copy.deepcopy(router.state_dict())
    router.load_state_dict(best_weights)
    with torch.no_grad():
        router.up.weight.mul_(scaling[0])
        router.up.bias.mul_(scaling[0]).add_(scaling[1])
        router.down.weight.div_(std)
        router.down.bias.sub_(router.down.weight @ mean)
    return best


def platt_scaling(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Fit (a, c) of `sigmoid(a * logits + c)` with smoothed targets (Platt 1999), on the CPU."""
    x = logits.double()
    positives, negatives = float(labels.sum()), float((~labels).sum())
    target = torch.where(labels, (positives + 1) / (positives + 2), 1 / (negatives + 2)).double()
    features = torch.stack([x, torch.ones_like(x)], dim=1)
    coefficients = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for _ in range(50):  # Newton's method
        probability = torch.sigmoid(features @ coefficients)
        gradient = features.T @ (probability - target)
        curvature = features.T @ (features * (probability * (1 - probability))[:, None])
        step = torch.linalg.solve(curvature + 1e-6 * torch.eye(2, dtype=torch.float64), gradient)
        coefficients = coefficients - step.clamp(-1.0, 1.0)
        if float(step.abs().max()) < 1e-9:
            break
    scale, shift = coefficients.tolist()
    return max(scale, 0.0), shift  # a negative scale would reverse the ranking of a router worse than chance


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve of `scores` for boolean `labels`; 0.5 if all labels are the same."""
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if positives == 0 or negatives == 0:
        return 0.5
    _, order, counts = scores.unique(return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2  # ties share their mean rank
    rank_sum = float(mean_rank[order][labels].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def expected_calibration_error(scores: Tensor, labels: Tensor, num_bins: int = 15) -> float:
    """Expected calibration error (ECE) over bins of equal width."""
    bins = (scores * num_bins).long().clamp(0, num_bins - 1)
    gaps = torch.bincount(bins, weights=(scores.double() - labels.double()), minlength=num_bins)
    return float(gaps.abs().sum()) / len(scores)


def fit_router(
    exit_point: ExitPoint,
    exit_layer: int,
    splits: tuple[StateBatch, StateBatch],
    unembed: Unembed,
    labels: str,
    seed: int,
) -> dict[str, float]:
    """Train an exit layer's router in place, from counted positions of the fit and tune splits; see `train_router`."""
    parts = []
    for batch in splits:
        states = batch.hidden_states[exit_layer]
        may_exit = router_labels(labels, unembed, exit_point.head, states, batch.final_states, batch.top_tokens)
        with torch.no_grad():
            parts.append((unembed.normalize(states).float(), may_exit.to(states.device)))
    figures = train_router(exit_point.router, parts[0], parts[1], seed)
    round_weights(exit_point.router)
    return figures


@torch.no_grad()
def decide(whole: StateBatch, routers: TIDERouters, unembed: Unembed) -> dict[str, Tensor]:
    """The tensors of [`threshold.Decisions`] at every counted position of whole documents, on the CPU."""
    batch = whole.only_counted()
    scores, agrees = [], []
    for layer in routers.exit_layers:
        states = batch.hidden_states[layer]
        scores.append(routers[layer].router(unembed.normalize(states)).cpu())
        agrees.append(agreement_labels(unembed, routers[layer].head, states, batch.top_tokens).cpu())
    return {
        "scores": torch.stack(scores, 1),
        "agrees": torch.stack(agrees, 1),
        "document_ids": batch.document_ids.cpu(),
    }
