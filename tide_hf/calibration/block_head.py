"""Train a block head on whole documents, by distillation from the full model."""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..base_model.structure import DecoderStructure, input_device, output_device
from ..base_model.unembed import DraftUnembed, Unembed
from ..common.errors import ConfigurationError, UnsupportedModelError
from ..depth.gates import FixedDepthRun, Gate, LayerCall, LayerGate, active, open_gates, remove_gates
from ..routers.block_head import block_config_of
from ..routers.exit_points import BlockPoint, logit_of
from ..routers.routers import TIDERouters
from .documents import TokenBatch
from .heads import FrequentUnembed, distillation_loss, round_weights
from .routers import area_under_curve, expected_calibration_error, platt_scaling
from .states import StateBatch, StateStore
from .training import mixed_precision, train_epochs

LEARNING_RATE = 2e-3  # learning rate of the block head's decoder layer
TRANSLATOR_RATE = 6e-4  # learning rate of the translator, which starts at the closed-form solution
FLOOR = 0.05  # of the learning rates
MAX_GRADIENT = 1.0
# Weight of a second loss term. The second draft token is predicted from the block head's own prediction of the final
# state, not from the true final state. So the block head is also trained on its own predictions, at positions where the
# predicted token was right (compare HASS, arXiv 2408.15766).
SECOND_SHARE = 0.5
RIDGE_PENALTY = 1e-2
DOCUMENTS_PER_STEP = 16
# Number of epochs, and factor on the learning rates.
FRESH = 6, 1.0  # for a new block head
FURTHER = 4, 0.5  # for a trained block head; the lower rates keep it from forgetting


@dataclass(frozen=True)
class DocumentBatch(TokenBatch):
    """Whole documents, right-padded, with the base model's states before the final norm, (rows, length, D) each."""

    states: Tensor  # after the layer from which the block head drafts
    final: Tensor  # after the last layer


class BlockTrainer:
    """Trains a block head in place, in float32. The block head drafts after `block_layer` layers.

    The model must run at full depth; `tokens` (V,) is the draft vocabulary, ascending.
    """

    def __init__(
        self, model: PreTrainedModel, unembed: Unembed, point: BlockPoint, block_layer: int, tokens: Tensor
    ) -> None:
        self.model, self.structure, self.unembed = model, unembed.structure, unembed
        self.point, self.head, self.block_layer = point, point.head, block_layer
        self.log_probs, self.drafts = FrequentUnembed(unembed, tokens), DraftUnembed(unembed, tokens)
        self.gate = Gate(self.head.layer)
        self.head.use_attention_of(model.config.get_text_config())

    def start(self, batches: Iterable[DocumentBatch]) -> None:
        """Initialise the layer as a copy of the base model's last layer, and the translator by ridge regression."""
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
        self,
        batches: Callable[[], Iterable[DocumentBatch]],
        num_batches: int,
        epochs: int,
        rate: float = 1.0,
        *,
        deadline: float = math.inf,
    ) -> Iterator[tuple[int, float]]:
        """Train for `epochs`, or until `deadline` in `perf_counter` time; yield (steps so far, mean loss) per epoch.

        The learning rates are scaled by `rate`; see [`train_epochs`].
        """
        rates = [(self.head.translator, rate * TRANSLATOR_RATE), (self.head.layer, rate * LEARNING_RATE)]
        optimizer = torch.optim.AdamW(
            [{"params": module.parameters(), "lr": peak} for module, peak in rates],
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        self.head.requires_grad_(True)

        def step(batch: DocumentBatch, _: float) -> float:
            return self._step(batch, optimizer)

        yield from train_epochs(optimizer, step, batches, num_batches, epochs, floor=FLOOR, deadline=deadline)
        self.head.requires_grad_(False)

    def states(self, batch: DocumentBatch, previous: Tensor | None = None) -> Tensor:
        """Predict the final states with the block head, (rows, length, D).

        Each prediction reads the previous token's final state: that in `previous` (rows, length, D), or the true state.
        """
        inputs = self._inputs(batch, batch.final if previous is None else previous)
        call = self._call(batch).on(inputs[0].device).with_state(self.head.translate(*inputs))
        return self.head.state_of(self.gate.native(*call.args, **call.kwargs))

    def _step(self, batch: DocumentBatch, optimizer: torch.optim.Optimizer) -> float:
        counted = batch.counted.to(batch.final.device)
        with mixed_precision(batch.final.device):
            states = self.states(batch)
            student = self.log_probs(states[counted])
        with torch.no_grad():
            teacher = self.log_probs(batch.final[counted].float())
        loss = total = distillation_loss(student, teacher, teacher.argmax(dim=-1))
        second = _after_right_tokens(counted, student, teacher)
        if second.any():
            with mixed_precision(batch.final.device):
                student = self.log_probs(self.states(batch, states.detach())[second])
            teacher = teacher[second[counted]]
            total = loss + SECOND_SHARE * distillation_loss(student, teacher, teacher.argmax(dim=-1))
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT)
        optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def _inputs(self, batch: DocumentBatch, final: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised states at the block's layer, and normalised final states of the previous tokens; float32."""
        dtype = self.model.dtype
        states, final = (self.unembed.normalize(part.to(dtype)).float() for part in (batch.states, final))
        return states, nn.functional.pad(final, (0, 0, 1, 0))[:, :-1]

    def _regression(self, batch: DocumentBatch) -> tuple[Tensor, Tensor]:
        seen = batch.attention_mask.bool().to(batch.final.device)
        joined = torch.cat(self._inputs(batch, batch.final), dim=-1)[seen]
        return torch.cat([joined, joined.new_ones(len(joined), 1)], dim=-1), batch.final[seen].float()

    @torch.no_grad()
    def _call(self, batch: DocumentBatch) -> LayerCall:
        """The arguments that the base model passes to the layer after `block_layer`, such as masks; no layer runs."""
        device = input_device(self.model)
        inputs = {"input_ids": batch.input_ids.to(device), "attention_mask": batch.attention_mask.to(device)}
        run = _StraightTo(self.structure, None, self.block_layer)
        with _gates(self.structure), active(run):
            return run.call_after(self.model, **inputs, use_cache=False)


class _StraightTo(FixedDepthRun):
    """A forward pass that skips every layer up to the exit layer and then ends."""

    def execute(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the layer's input instead of running the layer."""
        return gate.with_state(None, LayerCall(args, kwargs).state)


@contextmanager
def _gates(structure: DecoderStructure) -> Iterator[None]:
    """Install gates on the layers, unless TIDE is attached and has installed them already."""
    if isinstance(structure.layers[0].__dict__.get("forward"), Gate):
        yield
        return
    open_gates(structure)
    try:
        yield
    finally:
        remove_gates(structure)


def _after_right_tokens(counted: Tensor, student: Tensor, teacher: Tensor) -> Tensor:
    """(rows, length) mask of counted positions directly after positions where student and teacher agree."""
    right = torch.zeros_like(counted)
    right[counted] = student.argmax(dim=-1) == teacher.argmax(dim=-1)
    return counted & nn.functional.pad(right, (1, 0))[:, :-1]


def place_block(model: PreTrainedModel, structure: DecoderStructure) -> tuple[int, dict[str, Any]]:
    """Find the first layer that a block head can follow, and the head's config, or raise [`UnsupportedModelError`].

    Deeper block heads cost more and agree no more often (41% after 1 or 2 of 30 layers, 39-40% after 4 or 8).
    """
    last = structure.num_layers - 1
    for block_layer in range(1, last):
        try:
            return block_layer, block_config_of(model, structure, block_layer)
        except UnsupportedModelError:
            continue
    return last, block_config_of(model, structure, last)


def block_start(
    start_from: TIDERouters | str | os.PathLike[str], model: PreTrainedModel, exit_strategy: str
) -> TIDERouters:
    """The routers whose block head is trained further, loaded if `start_from` is a folder or Hub repository."""
    routers = start_from if isinstance(start_from, TIDERouters) else TIDERouters.from_pretrained(start_from)
    routers.check_base_model(model)
    if routers.block is None or exit_strategy != "block":
        raise ConfigurationError(
            "start_from works with block heads only, since no other head is trained further",
            got=f"routers {'without' if routers.block is None else 'with'} a block head, and {exit_strategy=}",
            expected="routers with a block head, and exit_strategy='block'",
            do="Pass both, or leave start_from out to train a new block head.",
        )
    return routers


@dataclass(frozen=True)
class BlockStage:
    """The stage that trains and measures a block head on stored states; `seed` determines the documents' order."""

    trainer: BlockTrainer
    store: StateStore
    seed: int

    def make(self, deadline: float, *, is_fresh: bool) -> dict[str, Any]:
        """Train until `deadline` in `perf_counter` time at the latest; return facts about the training.

        A block head that is not fresh keeps its old weights if the new weights agree less often on the tune split.
        """
        epochs, rate = FRESH if is_fresh else FURTHER
        point, facts = self.trainer.point, {}
        before = copy.deepcopy(point.head.state_dict())
        if is_fresh:
            self.trainer.start(self._batches("fit"))
        else:
            facts["tune_agreement_before"] = self._agreement("tune")
        num_batches = sum(-(-len(shard.rows) // DOCUMENTS_PER_STEP) for shard in self.store.shards("fit"))
        seeds = itertools.count(self.seed)
        trained = list(
            self.trainer.train(lambda: self._batches("fit", next(seeds)), num_batches, epochs, rate, deadline=deadline)
        )
        round_weights(point.head)
        if not is_fresh:
            facts["tune_agreement"] = self._agreement("tune")
            if facts["tune_agreement"] < facts["tune_agreement_before"]:
                point.head.load_state_dict(before)
        log_probabilities, agrees = self._scored("tune")
        scaling = platt_scaling(logit_of(log_probabilities), agrees)
        with torch.no_grad():
            point.confidence.copy_(torch.tensor(scaling).bfloat16())
        steps, loss = trained[-1]
        stopped = steps < epochs * num_batches
        return {"epochs": len(trained), "steps": steps, "stopped": stopped, "loss": loss, **facts}

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Measure the block head and its confidence on the certify split, ready for JSON."""
        log_probabilities, agrees = self._scored("certify")
        scores = self.trainer.point.score(log_probabilities).cpu()
        return {
            "layer": self.trainer.block_layer,
            "agreement": float(agrees.double().mean()),
            "confidence_auc": area_under_curve(scores, agrees),
            "expected_calibration_error": expected_calibration_error(scores, agrees),
            "parameters": sum(parameter.numel() for parameter in self.trainer.point.parameters()),
        }

    def _agreement(self, split: str) -> float:
        _, agrees = self._scored(split)
        return float(agrees.double().mean())

    @torch.no_grad()
    def _scored(self, split: str) -> tuple[Tensor, Tensor]:
        """Log-probabilities (N,) of drafted tokens at counted positions, and whether the full model agrees (N,)."""
        found, agrees = [], []
        for batch in self._batches(split, self.seed):
            predictions = self.trainer.states(batch)[batch.counted].to(self.trainer.model.dtype)
            top = self.trainer.unembed(batch.final[batch.counted].to(predictions.dtype)).argmax(dim=-1)
            drafted, log_probabilities = self.trainer.drafts.top1(predictions)
            found.append(log_probabilities.cpu())
            agrees.append((drafted == top).cpu())
        return torch.cat(found), torch.cat(agrees)

    def _batches(self, split: str, seed: int | None = None) -> Iterator[DocumentBatch]:
        """Whole documents, `DOCUMENTS_PER_STEP` at a time; shuffled if there is a seed."""
        device, block_layer = output_device(self.trainer.structure), self.trainer.block_layer
        shards = self.store.shards(split)
        if seed is not None:
            random.Random(seed).shuffle(shards)
        for shard in shards:
            whole = self.store.read(shard, [block_layer]).to(device, torch.float32)
            documents = whole.document_ids.unique_consecutive().tolist()
            if seed is not None:
                random.Random(seed + shard.number).shuffle(documents)
            for start in range(0, len(documents), DOCUMENTS_PER_STEP):
                yield pad_documents(whole, documents[start : start + DOCUMENTS_PER_STEP], block_layer)


def pad_documents(whole: StateBatch, documents: list[int], exit_layer: int) -> DocumentBatch:
    """Right-pad the documents with ids `documents` into a batch, with their states at `exit_layer`."""
    rows = [(whole.document_ids == document).nonzero()[:, 0] for document in documents]

    def padded(tensor: Tensor) -> Tensor:
        return nn.utils.rnn.pad_sequence([tensor[row] for row in rows], batch_first=True)

    return DocumentBatch(
        input_ids=padded(whole.tokens),
        attention_mask=padded(torch.ones_like(whole.tokens)),
        counted=padded(whole.counted),
        states=padded(whole.hidden_states[exit_layer]),
        final=padded(whole.final_states),
    )
