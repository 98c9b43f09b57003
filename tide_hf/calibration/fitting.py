"""The steps of a calibration that run over text: fit the heads, train the routers, see what they would decide."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..modeling_tide import ExitHead, TIDERouters
from ..unembed import Unembed
from .hidden_states import Reservoir, StateBatch
from .labels import agreement_labels, router_labels
from .threshold import Decisions
from .training import RIDGE_PENALTIES, Moments, train_router

FIT_CAPACITY = 24_000  # positions kept for the routers: enough for their few weights, and a bounded memory
TUNE_CAPACITY = 8_000


def collect_moments(batches: Iterable[StateBatch], routers: TIDERouters, reservoir: Reservoir) -> dict[int, Moments]:
    """Take in the fit split: moments of all positions for the heads, and a part of them for the routers.

    An error counts for less where the final state is large, since the final norm takes the scale away.

    Args:
        batches: The base model's states.
        routers: Routers with fresh heads.
        reservoir: Takes what the routers are trained on.

    Returns:
        Moments by exit layer.
    """
    moments = {layer: Moments(routers.config.hidden_size) for layer in routers.exit_layers}
    for batch in batches:
        reservoir.add(batch)
        targets = batch.final_states.float()
        weights = targets.square().mean(dim=-1).clamp_min(1e-12).reciprocal()
        for layer, states in batch.hidden_states.items():
            moments[layer].add(states.float(), targets, weights)
    return moments


def fit_head(head: ExitHead, moments: Moments, tune_states: Tensor, tune_tokens: Tensor, unembed: Unembed) -> None:
    """Give a head the closed-form translator whose penalty agrees most often on the tune split.

    Args:
        head: A head with a translator of full rank; another kind stays as it is.
        moments: Of the fit split.
        tune_states: (N, D) states of the tune split at this exit layer.
        tune_tokens: (N,) the full model's top tokens there.
        unembed: The base model's unembedding.
    """
    if not isinstance(head.translator, torch.nn.Linear):
        return
    best = -1.0
    weight, bias = head.translator.weight, head.translator.bias
    kept = (weight.detach().clone(), bias.detach().clone())
    for penalty in RIDGE_PENALTIES:
        solution = moments.solve(penalty)
        _assign(head.translator, solution)
        agreement = float(agreement_labels(unembed, head, tune_states, tune_tokens).float().mean())
        if agreement > best:
            best, kept = agreement, solution
    _assign(head.translator, kept)


def train_routers(
    routers: TIDERouters, fit: StateBatch, tune: StateBatch, unembed: Unembed, seed: int, labels: str = "agreement"
) -> Iterable[int]:
    """Train every router on where a position may leave; yield each exit layer when it is done.

    Args:
        routers: Routers whose heads are fitted.
        fit: Positions of the fit split.
        tune: Positions of the tune split.
        unembed: The base model's unembedding.
        seed: Of the training.
        labels: What a router predicts; see [`labels.router_labels`].
    """
    for layer in routers.exit_layers:
        splits = []
        for part in (fit, tune):
            states = part.hidden_states[layer].to(routers.device)
            head = routers[layer].head
            may_leave = router_labels(labels, unembed, head, states, part.final_states, part.top_tokens)
            with torch.no_grad():
                splits.append((unembed.normalize(states).float(), may_leave.to(states.device)))
        train_router(routers[layer].router, splits[0], splits[1], seed + layer)
        yield layer


@torch.no_grad()
def decide(batches: Iterable[StateBatch], routers: TIDERouters, unembed: Unembed) -> Decisions:
    """Note for every position what each exit layer's router scores and whether its head is right.

    Whatever the routers predict, the threshold is certified on agreement, since its promise is about tokens.
    """
    scores, agrees, documents = [], [], []
    for batch in batches:
        columns = [
            (
                routers[layer].router(unembed.normalize(states)).cpu(),
                agreement_labels(unembed, routers[layer].head, states, batch.top_tokens).cpu(),
            )
            for layer, states in batch.hidden_states.items()
        ]
        scores.append(torch.stack([score for score, _ in columns], dim=1))
        agrees.append(torch.stack([agree for _, agree in columns], dim=1))
        documents.append(batch.document_ids.cpu())
    return Decisions(
        routers.exit_layers,
        routers.config.num_hidden_layers,
        torch.cat(scores),
        torch.cat(agrees),
        torch.cat(documents),
    )


@torch.no_grad()
def round_weights(module: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round weights to the dtype they are stored in, so that everything after is measured on what is stored."""
    for parameter in module.parameters():
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def _assign(translator: torch.nn.Linear, solution: tuple[Tensor, Tensor]) -> None:
    translator.weight.copy_(solution[0])
    translator.bias.copy_(solution[1])
    round_weights(translator)
