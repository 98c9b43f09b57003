"""Distillation: move exit heads on from the closed-form solution to the full model's own choices."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base_model.structure import DecoderStructure, output_device
from ..base_model.unembed import Unembed, is_plain_linear
from ..routers.exit_points import ExitHead
from .fitting import round_weights
from .hidden_states import StateBatch

FREQUENT_TOKENS = 4096  # logits of the whole vocabulary cost far more and bring no more agreement
EPOCHS, ROWS_PER_STEP, PATIENCE = 5, 256, 2
LEARNING_RATE = 3e-4  # in units of the final states' root mean square
IGNORED = -100
STEPS_PER_LOOK = 8  # at the clock


@dataclass(frozen=True)
class Outcome:
    """What became of a distillation.

    Attributes:
        epochs: Epochs that were finished.
        best_epoch: The one that was kept; 0 is the closed form.
        stopped: Whether the time ran out.
    """

    epochs: int
    best_epoch: int
    stopped: bool


class FrequentUnembed:
    """Logits of the most frequent tokens alone, differentiable, from frozen float32 copies of norm and head.

    Args:
        unembed: The base model's unembedding; see [`can_distil`].
        tokens: (V,) the tokens.
    """

    def __init__(self, unembed: Unembed, tokens: Tensor) -> None:
        structure = unembed.structure
        source: Any = structure.head
        self.device, tokens = output_device(structure), tokens.to(source.weight.device)
        head = nn.Linear(source.weight.shape[1], len(tokens), bias=getattr(source, "bias", None) is not None)
        head.to(self.device)
        with torch.no_grad():
            head.weight.copy_(source.weight[tokens])
            if head.bias is not None:
                head.bias.copy_(source.bias[tokens])
        norm, projection = (
            copy.deepcopy(part).to(self.device, torch.float32) if part is not None else None
            for part in (structure.norm, structure.projection)
        )
        for part in (head, norm, projection):
            if part is not None:
                part.requires_grad_(False)
        self._unembed = copy.copy(unembed)
        self._unembed.structure = replace(
            structure, head=head, norm=norm, projection=projection, vocab_size=len(tokens)
        )
        self.positions = torch.full((structure.vocab_size,), IGNORED)
        self.positions[tokens.cpu()] = torch.arange(len(tokens))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """(N, D) states before the final norm, float32 -> (N, V) log probabilities, float32."""
        return self._unembed(hidden_states).float().log_softmax(dim=-1)


def can_distil(structure: DecoderStructure) -> bool:
    """Whether norm, projection and head can be differentiated: neither packed (8 bit) nor offloaded."""
    others = [part for part in (structure.norm, structure.projection) if part is not None]
    weights: list[Any] = [weight for part in others for weight in part.parameters()]
    readable = all(weight.is_floating_point() and weight.device.type != "meta" for weight in weights)
    return readable and is_plain_linear(structure.head)


def frequent_tokens(counts: Tensor, number: int = FREQUENT_TOKENS) -> Tensor:
    """The `number` most frequent tokens by `counts` (vocab_size,), ascending; among equals the lowest ids."""
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
) -> Outcome:
    """Train a translator in place: half on the full model's distribution, half on its top token.

    The epoch that agrees most often on `tune`, among `tokens`, is kept; the closed form counts as one of them.

    Args:
        head: A `"linear"` head in closed form.
        exit_layer: Its layer.
        fit: Counted positions of the fit split.
        tune: Counted positions of the tune split.
        unembed: The base model's unembedding; see [`can_distil`].
        tokens: (V,) the tokens whose probabilities are compared.
        seed: Of the order of the positions.
        deadline: `time.perf_counter()` at which to stop.
    """
    assert head.translator is not None
    frequent = FrequentUnembed(unembed, tokens)
    student = _Student(head, fit.hidden_states[exit_layer], frequent.device)
    rate = LEARNING_RATE * _root_mean_square(fit.final_states)
    optimizer = torch.optim.Adam(student.translator.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    num_steps = EPOCHS * -(-len(fit) // ROWS_PER_STEP)
    best, best_epoch, step = _agreement(head, exit_layer, tune, frequent), 0, 0
    kept = {name: value.clone() for name, value in head.state_dict().items()}
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(fit), generator=generator).split(ROWS_PER_STEP):
            if step % STEPS_PER_LOOK == 0 and time.perf_counter() >= deadline:
                head.load_state_dict(kept)
                return Outcome(epoch - 1, best_epoch, stopped=True)
            optimizer.param_groups[0]["lr"] = rate * (1 - step / num_steps)
            step += 1
            targets = frequent.positions[fit.top_tokens[rows]].to(frequent.device)
            loss = _distance(
                frequent(student(_rows(fit.hidden_states[exit_layer], rows, frequent.device))),
                frequent(_rows(fit.final_states, rows, frequent.device)),
                targets,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        student.copy_to(head)
        agreement = _agreement(head, exit_layer, tune, frequent)
        if agreement > best:
            best, best_epoch = agreement, epoch
            kept = {name: value.clone() for name, value in head.state_dict().items()}
        elif epoch - best_epoch >= PATIENCE:
            break
    head.load_state_dict(kept)
    return Outcome(epoch, best_epoch, stopped=False)


class _Student:
    """A translator that reads standardised states: they have a few huge entries, and share one learning rate."""

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
        """Give `head` the translator that does the same to states as they are."""
        plain = copy.deepcopy(self.translator)
        first, last = self._ends(plain)
        first.weight.div_(self.std)
        last.bias.copy_(2 * last.bias - plain(self.mean))  # the bias less what the weights make of the mean
        head.translator.load_state_dict(plain.state_dict())  # type: ignore[union-attr]
        round_weights(head)

    @staticmethod
    def _ends(translator: Any) -> tuple[nn.Linear, nn.Linear]:
        """The layers that read and that write: one and the same where the translator is of full rank."""
        if isinstance(translator, nn.Linear):
            return translator, translator
        return translator[0], translator[-1]


def _standardisation(states: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of each entry, (D,) each; a part at a time, since `states` may be large."""
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


def _distance(student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
    """Half divergence of the two distributions, half the student's surprise at the teacher's top token."""
    divergence = nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")
    surprise = nn.functional.nll_loss(student, targets, ignore_index=IGNORED, reduction="sum") / len(targets)
    return 0.5 * (divergence + surprise)
