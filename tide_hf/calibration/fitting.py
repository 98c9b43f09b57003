"""The learned parts of one exit layer: its head in closed form, its router, and what both decide."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..base_model.unembed import DraftUnembed, Unembed
from ..routers.exit_points import ExitHead, ExitPoint
from ..routers.routers import TIDERouters
from .hidden_states import StateBatch
from .labels import agreement_labels, router_labels
from .training import RIDGE_PENALTIES, Moments, train_router


def collect_moments(batches: Iterable[StateBatch], exit_layer: int, device: torch.device) -> Moments:
    """Take in the counted positions of the fit split.

    An error counts for less where the final state is large, since the final norm takes the scale away.

    Args:
        batches: The base model's states.
        exit_layer: The layer whose head is to be fitted.
        device: Where to compute.
    """
    moments: Moments | None = None
    for whole in batches:
        batch = whole.only_counted()
        if len(batch) == 0:
            continue
        inputs = batch.hidden_states[exit_layer].to(device).float()
        targets = batch.final_states.to(device).float()
        moments = moments if moments is not None else Moments(inputs.shape[1])
        moments.add(inputs, targets, targets.square().mean(dim=-1).clamp_min(1e-12).reciprocal())
    assert moments is not None  # every document has a counted position
    return moments


def fit_head(head: ExitHead, moments: Moments, tune_states: Tensor, tune_tokens: Tensor, drafts: DraftUnembed) -> float:
    """Give a head the closed-form translator whose penalty agrees most often on the tune split.

    Args:
        head: A `"linear"` head.
        moments: Of the fit split.
        tune_states: (N, D) states of the tune split at this exit layer, in the model's dtype.
        tune_tokens: (N,) the full model's top tokens there.
        drafts: The base model's unembedding to the tokens that are compared.

    Returns:
        The penalty.
    """
    best, best_penalty, kept = -1.0, 0.0, head.state_dict()
    for penalty in RIDGE_PENALTIES:
        _assign(head, moments.solve(penalty, rank=translator_rank(head)))
        agreement = draft_agreement(head, tune_states, tune_tokens, drafts)
        if agreement > best:
            best, best_penalty = agreement, penalty
            kept = {name: value.clone() for name, value in head.state_dict().items()}
    head.load_state_dict(kept)
    return best_penalty


@torch.no_grad()
def draft_agreement(head: nn.Module, states: Tensor, top_tokens: Tensor, drafts: DraftUnembed) -> float:
    """Share of positions at which `head` drafts the full model's top token."""
    hits = 0
    for state, token in zip(states.split(4096), top_tokens.split(4096), strict=True):
        hits += int((drafts(head(state)).cpu() == token.cpu()).sum())
    return hits / len(states)


def translator_rank(head: ExitHead) -> int | None:
    """Rank of a `"linear"` head's translator; `None` is full."""
    translator = head.translator
    return translator[0].out_features if isinstance(translator, nn.Sequential) else None  # type: ignore[return-value]


def fit_router(
    exit_point: ExitPoint,
    exit_layer: int,
    splits: tuple[StateBatch, StateBatch],
    unembed: Unembed,
    labels: str,
    seed: int,
) -> dict[str, float]:
    """Train one router, in place.

    Args:
        exit_point: The router, and the head that goes with it, fitted.
        exit_layer: Their layer.
        splits: Counted positions of the fit and of the tune split, in the model's dtype and on its device.
        unembed: The base model's unembedding.
        labels: What it predicts.
        seed: Of the training.

    Returns:
        Its figures on the tune split.
    """
    parts = []
    for batch in splits:
        with torch.no_grad():
            states = unembed.normalize(batch.hidden_states[exit_layer]).float()
        early = batch.hidden_states[exit_layer]
        may_leave = router_labels(labels, unembed, exit_point.head, early, batch.final_states, batch.top_tokens)
        parts.append((states, may_leave.to(states.device)))
    figures = train_router(exit_point.router, parts[0], parts[1], seed)
    round_weights(exit_point.router)
    return figures


@torch.no_grad()
def decide(whole: StateBatch, routers: TIDERouters, unembed: Unembed) -> dict[str, Tensor]:
    """Note for every counted position what each exit layer's router scores and whether its head is right.

    Args:
        whole: A shard, in the model's dtype.
        routers: Fitted routers.
        unembed: The base model's unembedding.

    Returns:
        `scores` (N, E) float32, `agrees` (N, E) bool and `document_ids` (N,), on the CPU.
    """
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


@torch.no_grad()
def round_weights(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round weights to the dtype they are stored in, so that everything after is measured on what is stored."""
    for parameter in module.parameters():
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def _assign(head: ExitHead, solution: tuple[Tensor, ...]) -> None:
    """Copy (A, b), or (down, up, b) where the translator is of low rank."""
    assert head.translator is not None
    for parameter, value in zip(head.translator.parameters(), solution, strict=True):
        parameter.copy_(value)
    round_weights(head)
