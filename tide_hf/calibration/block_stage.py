"""The stage of a calibration that makes a block head, from the shards of whole documents."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..base_model.structure import DecoderStructure, output_device
from ..base_model.unembed import DraftUnembed, Unembed
from ..common.errors import ConfigurationError, UnsupportedModelError, describe
from ..routers.block_head import block_config_of
from ..routers.exit_points import BlockPoint, logit_of
from ..routers.routers import TIDERouters
from .block_training import BlockTrainer, DocumentBatch
from .distillation import FrequentUnembed
from .fitting import round_weights
from .hidden_states import StateBatch
from .store import StateStore
from .training import area_under_curve, expected_calibration_error, platt_scaling

DOCUMENTS_PER_STEP = 16


@dataclass(frozen=True)
class Plan:
    """How a block is trained.

    Attributes:
        epochs: Times that it sees each document.
        rate: Share of the learning rates.
    """

    epochs: int
    rate: float


FRESH = Plan(epochs=6, rate=1.0)
FURTHER = Plan(epochs=4, rate=0.5)  # a block that has learnt: fast enough to take in other text, and not to forget


def place_block(model: PreTrainedModel, structure: DecoderStructure) -> tuple[int, dict[str, Any]]:
    """The shallowest exit layer that a block can follow, and the block's config.

    A deeper one agrees hardly more often (41% after one or two of 30 layers, 39-40% after four or eight), and costs
    more.

    Raises:
        UnsupportedModelError: No layer will do.
    """
    last = structure.num_layers - 1
    for block_layer in range(1, last):
        try:
            return block_layer, block_config_of(model, structure, block_layer)
        except UnsupportedModelError:
            continue
    return last, block_config_of(model, structure, last)


@dataclass(frozen=True)
class BlockStart:
    """A block head that is trained further.

    Attributes:
        point: The block.
        layer: Number of executed layers after which it drafts.
        config: What its layer is built from.
        num_documents: That it was trained on, in one calibration after another, as far as its record tells.
    """

    point: BlockPoint
    layer: int
    config: dict[str, Any]
    num_documents: int


def block_start(
    start_from: TIDERouters | str | os.PathLike[str], model: PreTrainedModel, exit_strategy: str
) -> BlockStart:
    """Take the block head out of routers.

    Args:
        start_from: The routers, or where they are.
        model: The base model.
        exit_strategy: Of the calibration.

    Raises:
        BaseModelMismatchError: They belong to another model.
        ConfigurationError: They have no block head, or none is to be made.
        RoutersNotFoundError: There are none; see `TIDERouters.from_pretrained`.
    """
    routers = start_from if isinstance(start_from, TIDERouters) else TIDERouters.from_pretrained(start_from)
    routers.check_base_model(model)
    config = routers.config
    if routers.block is None or config.block_layer is None or exit_strategy != "block":
        has = "without" if routers.block is None else "with"
        raise ConfigurationError(
            describe(
                "start_from is for block heads, which alone are trained further",
                got=f"routers {has} a block head, and exit_strategy={exit_strategy!r}",
                expected="routers with a block head, and exit_strategy='block'",
                do="Pass these, or leave start_from out, which makes everything anew.",
            )
        )
    record = config.calibration or {}
    num_documents = record.get("num_documents", 0) + record.get("block", {}).get("documents_before", 0)
    return BlockStart(routers.block, config.block_layer, config.block_config or {}, num_documents)


class BlockStage:
    """Makes one block head.

    Args:
        model: The base model, at full depth.
        structure: Its structure.
        unembed: Its unembedding.
        store: The states of the documents, at the block's exit layer among others.
        point: The block, in float32: fresh, or one that is to be trained further.
        block_layer: Number of executed layers after which it drafts.
        tokens: (V,) what it may draft, ascending.
        seed: Of the order of the documents.
        is_fresh: Whether the block has learnt nothing yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: DecoderStructure,
        unembed: Unembed,
        store: StateStore,
        point: BlockPoint,
        block_layer: int,
        tokens: Tensor,
        seed: int,
        is_fresh: bool = True,
    ) -> None:
        self.store, self.point, self.block_layer, self.seed = store, point, block_layer, seed
        self.is_fresh = is_fresh
        self.unembed, self.device = unembed, output_device(structure)
        self.drafts = DraftUnembed(unembed, tokens)
        taught = FrequentUnembed(unembed, tokens)
        self.trainer = BlockTrainer(model, structure, unembed, taught, point.head, block_layer)

    def make(self, deadline: float) -> dict[str, Any]:
        """Train until `deadline` (of `perf_counter`) at the latest; say how it went.

        A block that was to be trained further stays what it was where it would agree less on the tuning documents.
        """
        plan, facts = (FRESH if self.is_fresh else FURTHER), {}
        before = {name: value.clone() for name, value in self.point.head.state_dict().items()}
        if self.is_fresh:
            self.trainer.start(self._batches("fit"))
        else:
            facts["tune_agreement_before"] = self._agreement("tune")
        num_batches = sum(1 for _ in self._documents("fit"))
        epochs = iter(range(plan.epochs))
        trained = list(
            self.trainer.train(
                lambda: self._batches("fit", self.seed + next(epochs)),
                num_batches,
                plan.epochs,
                rate=plan.rate,
                deadline=deadline,
            )
        )
        round_weights(self.point.head)
        if not self.is_fresh:
            facts["tune_agreement"] = self._agreement("tune")
            if facts["tune_agreement"] < facts["tune_agreement_before"]:
                self.point.head.load_state_dict(before)
        log_probabilities, agrees = self._scored("tune")
        scaling = platt_scaling(logit_of(log_probabilities), agrees)
        with torch.no_grad():
            self.point.confidence.copy_(torch.tensor(scaling).bfloat16())
        steps, loss = trained[-1]
        stopped = steps < plan.epochs * num_batches
        return {"epochs": len(trained), "steps": steps, "stopped": stopped, "loss": loss, **facts}

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Measure the block and its confidence on the certifying documents, ready for JSON."""
        log_probabilities, agrees = self._scored("certify")
        scores = self.point.score(log_probabilities).cpu()
        return {
            "layer": self.block_layer,
            "agreement": float(agrees.double().mean()),
            "confidence_auc": area_under_curve(scores, agrees),
            "expected_calibration_error": expected_calibration_error(scores, agrees),
            "parameters": sum(parameter.numel() for parameter in self.point.parameters()),
        }

    def _agreement(self, split: str) -> float:
        _, agrees = self._scored(split)
        return float(agrees.double().mean())

    @torch.no_grad()
    def _scored(self, split: str) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the block's tokens at counted positions, (N,), and whether they are right, (N,)."""
        found, agrees = [], []
        for batch in self._batches(split, self.seed):
            guesses = self.trainer.states(batch)[batch.counted].to(self.trainer.model.dtype)
            top = self.unembed(batch.final[batch.counted].to(guesses.dtype)).argmax(dim=-1)
            drafted, log_probabilities = self.drafts.top1(guesses)
            found.append(log_probabilities.cpu())
            agrees.append((drafted == top).cpu())
        return torch.cat(found), torch.cat(agrees)

    def _batches(self, split: str, seed: int | None = None) -> Iterator[DocumentBatch]:
        """Whole documents, a few at a time; shuffled where there is a seed."""
        shards = self.store.shards(split)
        if seed is not None:
            random.Random(seed).shuffle(shards)
        for shard in shards:
            whole = self.store.read(shard, [self.block_layer]).to(self.device, torch.float32)
            documents = whole.document_ids.unique_consecutive().tolist()
            if seed is not None:
                random.Random(seed + shard.number).shuffle(documents)
            for start in range(0, len(documents), DOCUMENTS_PER_STEP):
                yield pad_documents(whole, documents[start : start + DOCUMENTS_PER_STEP], self.block_layer)

    def _documents(self, split: str) -> Iterator[int]:
        """The first document of each step."""
        for shard in self.store.shards(split):
            yield from range(0, len(shard.rows), DOCUMENTS_PER_STEP)


def pad_documents(whole: StateBatch, documents: list[int], exit_layer: int) -> DocumentBatch:
    """Cut some documents out of a batch and lay them side by side, padded on the right.

    Args:
        whole: Documents one after another.
        documents: Their ids.
        exit_layer: The layer whose states are wanted.
    """
    rows = [(whole.document_ids == document).nonzero()[:, 0] for document in documents]

    def laid_out(tensor: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([tensor[row] for row in rows], batch_first=True)

    return DocumentBatch(
        input_ids=laid_out(whole.tokens),
        attention_mask=laid_out(torch.ones_like(whole.tokens)),
        counted=laid_out(whole.counted),
        early=laid_out(whole.hidden_states[exit_layer]),
        final=laid_out(whole.final_states),
    )
