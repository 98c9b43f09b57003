"""Fit exit heads: ridge regression in closed form, then distillation."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base_model.structure import DecoderStructure, output_device
from ..base_model.unembed import DraftUnembed, Unembed, is_plain_linear
from ..routers.exit_points import ExitHead
from .states import StateBatch

RIDGE_PENALTIES = (1e-3, 1e-2, 1e-1)  # in units of each input's variance
FREQUENT_TOKENS = 4096  # distilling on the whole vocabulary costs far more and gives no more agreement
EPOCHS, ROWS_PER_STEP, PATIENCE = 5, 256, 2
LEARNING_RATE = 3e-4  # times the root mean square of the final states
IGNORED = -100


class Moments:
    """First and second moments of (input state, target state), sufficient statistics of a ridge regression.

    Sums are taken relative to the first batch's mean: a few entries of hidden states are so large that their squares
    would swamp the others in float32.
    """

    def __init__(self, hidden_size: int) -> None:
        self.weight = 0.0
        self.origin: tuple[Tensor, Tensor] | None = None
        self.sum_x = torch.zeros(hidden_size, dtype=torch.float64)
        self.sum_y = torch.zeros(hidden_size, dtype=torch.float64)
        self.sum_xx = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)
        self.sum_xy = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)

    def add(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> None:
        """Accumulate N positions: inputs and targets (N, D), weights (N,), all float32."""
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
        """Solve for A (D, D) and b (D,), float32, of the translator `y = x + A x + b` by least squares.

        The ridge `penalty` on A is in units of each input's variance. With a `rank`, A is returned as factors (rank, D)
        and (D, rank) of the reduced-rank regression, whose outputs are nearest to the full-rank solution's.
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


def collect_moments(batches: Iterable[StateBatch], exit_layer: int, device: torch.device) -> Moments:
    """Moments over the counted positions of whole documents; computed on `device`.

    Errors are weighted by the inverse mean square of the final state, whose scale the final norm removes.
    """
    moments: Moments | None = None
    for whole in batches:
        batch = whole.only_counted()
        if len(batch) > 0:
            inputs = batch.hidden_states[exit_layer].to(device).float()
            targets = batch.final_states.to(device).float()
            moments = moments or Moments(inputs.shape[1])
            moments.add(inputs, targets, targets.square().mean(dim=-1).clamp_min(1e-12).reciprocal())
    assert moments is not None  # every document has a counted position
    return moments


def fit_head(head: ExitHead, moments: Moments, tune_states: Tensor, tune_tokens: Tensor, drafts: DraftUnembed) -> float:
    """Set a linear head's translator to the ridge solution of highest agreement; return the penalty of that solution.

    `moments` are of the fit split. Agreement is the share of `tune_states` (N, D), in the model's dtype, for which the
    head's top token among the tokens of `drafts` equals the full model's top token, in `tune_tokens` (N,).
    """
    rank = head.translator[0].out_features if isinstance(head.translator, nn.Sequential) else None
    best, best_penalty, best_weights = -1.0, 0.0, head.state_dict()
    for penalty in RIDGE_PENALTIES:
        _assign(head, moments.solve(penalty, rank=rank))  # type: ignore[arg-type]
        agreement = draft_agreement(head, tune_states, tune_tokens, drafts)
        if agreement > best:
            best, best_penalty, best_weights = agreement, penalty, copy.deepcopy(head.state_dict())
    head.load_state_dict(best_weights)
    return best_penalty


@torch.no_grad()
def draft_agreement(head: nn.Module, states: Tensor, top_tokens: Tensor, drafts: DraftUnembed) -> float:
    """Share of positions at which `head` drafts the full model's top token."""
    hits = 0
    for state, token in zip(states.split(4096), top_tokens.split(4096), strict=True):
        hits += int((drafts(head(state)).cpu() == token.cpu()).sum())
    return hits / len(states)


@torch.no_grad()
def round_weights(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round weights to the dtype in which they are saved, so that all later figures hold for the saved weights."""
    for parameter in module.parameters():
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def _assign(head: ExitHead, solution: tuple[Tensor, ...]) -> None:
    """Copy (A, b), or (down, up, b) at low rank, into the translator, and round it."""
    assert head.translator is not None
    for parameter, value in zip(head.translator.parameters(), solution, strict=True):
        parameter.copy_(value)
    round_weights(head)


class FrequentUnembed:
    """Differentiable log-probabilities of `tokens` (V,), from frozen float32 copies of norm and output head."""

    def __init__(self, unembed: Unembed, tokens: Tensor) -> None:
        structure = unembed.structure
        self.device = output_device(structure)
        weights = structure.head.state_dict()
        head: Any = nn.Linear(weights["weight"].shape[1], len(tokens), bias="bias" in weights)
        head.load_state_dict({name: weight[tokens.to(weight.device)] for name, weight in weights.items()})
        norm, projection, head = (
            copy.deepcopy(part).to(self.device, torch.float32).requires_grad_(False) if part is not None else None
            for part in (structure.norm, structure.projection, head)
        )
        self._unembed = copy.copy(unembed)
        self._unembed.structure = replace(
            structure, head=head, norm=norm, projection=projection, vocab_size=len(tokens)
        )
        self.positions = torch.full((structure.vocab_size,), IGNORED)
        self.positions[tokens.cpu()] = torch.arange(len(tokens))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """(N, D) states before the final norm, float32 -> (N, V) log-probabilities, float32."""
        return self._unembed(hidden_states).float().log_softmax(dim=-1)


def can_distil(structure: DecoderStructure) -> bool:
    """Whether norm, projection and output head are differentiable: neither quantised nor offloaded."""
    others = [part for part in (structure.norm, structure.projection) if part is not None]
    weights: list[Any] = [weight for part in others for weight in part.parameters()]
    readable = all(weight.is_floating_point() and weight.device.type != "meta" for weight in weights)
    return readable and is_plain_linear(structure.head)


def frequent_tokens(counts: Tensor, number: int = FREQUENT_TOKENS) -> Tensor:
    """The `number` most frequent tokens by `counts` (vocab_size,), ascending; ties go to the lowest ids."""
    return counts.argsort(descending=True, stable=True)[:number].sort().values


def distil_head(
    head: ExitHead,
    exit_layer: int,
    fit: StateBatch,
    tune: StateBatch,
    unembed: Unembed,
    tokens: Tensor,
    seed: int,
    deadline: float = float("inf"),
) -> dict[str, Any]:
    """Train a linear head's translator in place with [`distillation_loss`], starting from the closed-form solution.

    Of the weights after each epoch and the initial weights, `head` gets those whose top token among `tokens` (V,) is
    the full model's most often on `tune`. `fit` and `tune` hold only counted positions. Returns the number of finished
    `epochs`, `best_epoch` (0: initial weights), and whether `deadline`, in `perf_counter` time, `stopped` training.
    """
    assert head.translator is not None
    frequent = FrequentUnembed(unembed, tokens)
    student = _Student(head, fit.hidden_states[exit_layer], frequent.device)
    rate = LEARNING_RATE * _root_mean_square(fit.final_states)
    optimizer = torch.optim.Adam(student.translator.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    num_steps = EPOCHS * -(-len(fit) // ROWS_PER_STEP)
    best, best_epoch, step = _agreement(head, exit_layer, tune, frequent), 0, 0
    best_weights = copy.deepcopy(head.state_dict())
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(fit), generator=generator).split(ROWS_PER_STEP):
            if time.perf_counter() >= deadline:
                head.load_state_dict(best_weights)
                return {"epochs": epoch - 1, "best_epoch": best_epoch, "stopped": True}
            optimizer.param_groups[0]["lr"] = rate * (1 - step / num_steps)
            step += 1
            states, final = (_rows(x, rows, frequent.device) for x in (fit.hidden_states[exit_layer], fit.final_states))
            targets = frequent.positions[fit.top_tokens[rows]].to(frequent.device)
            optimizer.zero_grad()
            distillation_loss(frequent(student(states)), frequent(final), targets).backward()
            optimizer.step()
        student.copy_to(head)
        agreement = _agreement(head, exit_layer, tune, frequent)
        if agreement > best:
            best, best_epoch, best_weights = agreement, epoch, copy.deepcopy(head.state_dict())
        elif epoch - best_epoch >= PATIENCE:
            break
    head.load_state_dict(best_weights)
    return {"epochs": epoch, "best_epoch": best_epoch, "stopped": False}


class _Student:
    """A translator on standardised states, since one learning rate does not suit entries of very different scale."""

    def __init__(self, head: ExitHead, states: Tensor, device: torch.device) -> None:
        self.mean, self.std = (moment.to(device) for moment in _standardisation(states))
        self.translator = copy.deepcopy(head.translator).to(device, torch.float32).requires_grad_(True)  # type: ignore[union-attr]
        first, last = self._ends(self.translator)
        with torch.no_grad():
            last.bias.copy_(self.translator(self.mean))
            first.weight.mul_(self.std)

    def __call__(self, states: Tensor) -> Tensor:
        return states + self.translator((states - self.mean) / self.std)

    @torch.no_grad()
    def copy_to(self, head: ExitHead) -> None:
        """Fold the standardisation into the weights and copy them to `head`."""
        plain = copy.deepcopy(self.translator)
        first, last = self._ends(plain)
        first.weight.div_(self.std)
        last.bias.copy_(2 * last.bias - plain(self.mean))  # bias - W mean
        head.translator.load_state_dict(plain.state_dict())  # type: ignore[union-attr]
        round_weights(head)

    @staticmethod
    def _ends(translator: Any) -> tuple[nn.Linear, nn.Linear]:
        """First and last linear layer, which are the same layer at full rank."""
        if isinstance(translator, nn.Linear):
            return translator, translator
        return translator[0], translator[-1]


def _standardisation(states: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each entry, (D,) each; computed in slices, since `states` may be large."""
    mean = torch.stack([part.double().sum(dim=0) for part in states.split(4096)]).sum(dim=0) / len(states)
    squares = torch.stack([(part.double() - mean).square().sum(dim=0) for part in states.split(4096)]).sum(dim=0)
    std = (squares / len(states)).sqrt()
    return mean.float(), std.clamp_min(1e-3 * float(std.mean()) + 1e-8).float()


def _root_mean_square(states: Tensor) -> float:
    squares = sum(float(part.float().square().sum()) for part in states.split(4096))
    return (squares / states.numel()) ** 0.5


def _rows(states: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    return states[rows].to(device, torch.float32)


@torch.no_grad()
def _agreement(head: ExitHead, exit_layer: int, tune: StateBatch, frequent: FrequentUnembed) -> float:
    hits = 0
    for rows in torch.arange(len(tune)).split(4096):
        states = _rows(tune.hidden_states[exit_layer], rows, frequent.device)
        targets = frequent.positions[tune.top_tokens[rows]].to(frequent.device)
        hits += int((frequent(head(states)).argmax(dim=-1) == targets).sum())
    return hits / len(tune)


def distillation_loss(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Mean of KL(teacher || student) and the student's cross-entropy on `targets`.

    `student` and `teacher` are (N, V) log-probabilities; `targets` (N,) are indices of top tokens, or `IGNORED`.
    """
    divergence = nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")
    cross_entropy = nn.functional.nll_loss(student, targets, ignore_index=IGNORED, reduction="sum") / len(targets)
    return 0.5 * (divergence + cross_entropy)
