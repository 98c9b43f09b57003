"""Train a block head: a causal layer over whole documents, taught by the full model's own distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..base_model.structure import DecoderStructure, input_device
from ..base_model.unembed import Unembed
from ..depth.gates import FixedDepthRun, Gate, LayerCall, LayerGate, active, open_gates, remove_gates
from ..routers.block_head import BlockHead
from .mixed_precision import mixed_precision

LEARNING_RATE = 2e-3  # of the layer
TRANSLATOR_RATE = 6e-4  # which starts at the closed-form solution
WARMUP_STEPS, FLOOR = 20, 0.05
MAX_GRADIENT = 1.0
# A second draft leans on the block's own guess at the deep state, which is not the true one that the first has. So it
# is trained on its guesses as well, where they had the token right (compare HASS, arXiv 2408.15766), with this weight.
SECOND_SHARE = 0.5
RIDGE_PENALTY = 1e-2


@dataclass(frozen=True)
class DocumentBatch:
    """Whole documents, right-padded, with what the base model computed on them.

    Attributes:
        input_ids: (rows, length).
        attention_mask: (rows, length), 1 where there is a token.
        counted: (rows, length), True at the positions that calibration looks at.
        early: (rows, length, D) states at the block's exit layer, before the final norm.
        final: (rows, length, D) states after the last layer, before the final norm.
    """

    input_ids: Tensor
    attention_mask: Tensor
    counted: Tensor
    early: Tensor
    final: Tensor


Batches = Callable[[], Iterable[DocumentBatch]]


class BlockTrainer:
    """Trains one block head in place.

    Args:
        model: The base model, at full depth.
        structure: Its structure.
        unembed: Its unembedding, for the final norm.
        taught: Final states to log probabilities of the draft vocabulary, in float32, its weights frozen.
        head: The block, in float32; its layer starts as a copy of the base model's last where the shapes agree.
        block_layer: Number of executed layers after which it drafts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: DecoderStructure,
        unembed: Unembed,
        taught: Callable[[Tensor], Tensor],
        head: BlockHead,
        block_layer: int,
    ) -> None:
        self.model, self.structure, self.block_layer = model, structure, block_layer
        self.unembed, self.taught, self.head = unembed, taught, head
        self.gate = Gate(head.layer)
        head.use_attention_of(model.config.get_text_config())

    def start(self, batches: Iterable[DocumentBatch]) -> None:
        """Copy the base model's last layer, and solve for the translator in closed form."""
        source = dict(self.structure.layers[-1].named_parameters())
        with torch.no_grad():
            for name, parameter in self.head.layer.named_parameters():
                if name in source and source[name].shape == parameter.shape and source[name].is_floating_point():
                    parameter.copy_(source[name])
        size = self.structure.hidden_size
        products = torch.zeros(2 * size + 1, 2 * size + 1, dtype=torch.float64)
        cross = torch.zeros(2 * size + 1, size, dtype=torch.float64)
        for batch in batches:
            features, targets = self._regression(batch)
            weights = targets.square().mean(dim=-1, keepdim=True).clamp_min(1e-12).reciprocal()
            products += ((features * weights).T @ features).cpu().double()
            cross += ((features * weights).T @ targets).cpu().double()
        penalty = torch.diag(RIDGE_PENALTY * products.diagonal().clamp_min(1e-9))
        solution = torch.linalg.solve(products + penalty, cross).float()
        with torch.no_grad():
            self.head.translator.weight.copy_(solution[:-1].T)
            self.head.translator.bias.copy_(solution[-1])

    def train(
        self, batches: Batches, num_batches: int, epochs: int, *, rate: float = 1.0, deadline: float = math.inf
    ) -> Iterator[tuple[int, float]]:
        """Go over the documents `epochs` times, or until `deadline` (of `perf_counter`); yield (steps, mean loss).

        The learning rate, of which `rate` is a share, falls along a cosine over the steps, or over the time where that
        is the shorter.
        """
        rates = [(self.head.translator, rate * TRANSLATOR_RATE), (self.head.layer, rate * LEARNING_RATE)]
        optimizer = torch.optim.AdamW(
            [{"params": module.parameters(), "lr": peak, "peak": peak} for module, peak in rates],
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        self.head.requires_grad_(True)
        started, step = perf_counter(), 0
        for _ in range(epochs):
            losses = []
            for batch in batches():
                spent = (perf_counter() - started) / (deadline - started) if deadline < math.inf else 0.0
                progress = min(1.0, max(step / (epochs * num_batches), spent))
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * _schedule(step, progress)
                losses.append(self._step(batch, optimizer))
                step += 1
                if perf_counter() > deadline:
                    break
            yield step, sum(losses) / max(1, len(losses))
            if perf_counter() > deadline:
                break
        self.head.requires_grad_(False)

    def states(self, batch: DocumentBatch, deep: Tensor | None = None) -> Tensor:
        """The block's guesses at the final states.

        Args:
            batch: The documents.
            deep: (rows, length, D) states to guess from, each for the token behind it: by default the true ones.

        Returns:
            (rows, length, D).
        """
        inputs = self._inputs(batch, batch.final if deep is None else deep)
        call = self._call(batch).on(inputs[0].device).with_state(self.head.translate(*inputs))
        return self.head.state_of(self.gate.native(*call.args, **call.kwargs))

    def _step(self, batch: DocumentBatch, optimizer: torch.optim.Optimizer) -> float:
        counted = batch.counted.to(batch.final.device)
        with mixed_precision(batch.final.device):
            states = self.states(batch)
            student = self.taught(states[counted])
        with torch.no_grad():
            teacher = self.taught(batch.final[counted].float())
        loss = total = _loss(student, teacher)
        behind = _behind_right(counted, student, teacher)
        if behind.any():
            with mixed_precision(batch.final.device):
                student = self.taught(self.states(batch, states.detach())[behind])
            total = loss + SECOND_SHARE * _loss(student, teacher[behind[counted]])
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT)
        optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def _inputs(self, batch: DocumentBatch, deep: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self.model.dtype
        early, deep = (self.unembed.normalize(states.to(dtype)).float() for states in (batch.early, deep))
        return early, nn.functional.pad(deep, (0, 0, 1, 0))[:, :-1]

    def _regression(self, batch: DocumentBatch) -> tuple[Tensor, Tensor]:
        seen = batch.attention_mask.bool().to(batch.final.device)
        joined = torch.cat(self._inputs(batch, batch.final), dim=-1)[seen]
        return torch.cat([joined, joined.new_ones(len(joined), 1)], dim=-1), batch.final[seen].float()

    @torch.no_grad()
    def _call(self, batch: DocumentBatch) -> LayerCall:
        """Masks and positions as the base model makes them for the layer behind the exit; no layer runs."""
        with _gates(self.structure):
            run = _StraightTo(self.structure, None, self.block_layer)
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            with active(run):
                return run.call_after(
                    self.model,
                    **{name: ids.to(input_device(self.model)) for name, ids in inputs.items()},
                    use_cache=False,
                )


class _StraightTo(FixedDepthRun):
    """A pass that executes no layer and ends before one."""

    def execute(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand the input on."""
        return gate.with_state(None, LayerCall(args, kwargs).state)


@contextmanager
def _gates(structure: DecoderStructure) -> Iterator[None]:
    """Have gates in front of the layers, as a model with TIDE attached has anyway."""
    if isinstance(structure.layers[0].__dict__.get("forward"), Gate):
        yield
        return
    open_gates(structure)
    try:
        yield
    finally:
        remove_gates(structure)


def _loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Half the full model's distribution, half its top token; log probabilities, (N, V) each."""
    divergence = nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")
    return 0.5 * (divergence + nn.functional.nll_loss(student, teacher.argmax(dim=-1)))


def _behind_right(counted: Tensor, student: Tensor, teacher: Tensor) -> Tensor:
    """(rows, length) positions, of those that are counted, behind one whose top token the student has right."""
    right = torch.zeros_like(counted)
    right[counted] = student.argmax(dim=-1) == teacher.argmax(dim=-1)
    return counted & nn.functional.pad(right, (1, 0))[:, :-1]


def _schedule(step: int, progress: float) -> float:
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
