"""Perplexity of texts, read token by token from early exits: one pass serves every threshold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base_model.structure import find_structure, input_device
from ..base_model.unembed import Unembed
from ..calibration.documents import Document, plan_batches, token_batch
from ..calibration.sources import read_documents
from ..calibration.states import SLICE_ELEMENTS, StateBatch, StateReader, full_depth
from ..calibration.threshold import Bootstrap, exit_depths, exit_indices
from ..depth.gates import on_device
from ..routers.routers import TIDERouters
from .teacher_forcing import exit_scores

ARRAYS_PER_LOGIT = 2  # logits and log-probabilities


@dataclass(frozen=True)
class TextScores:
    """What each exit layer, and the full model, say to N tokens of some documents.

    Attributes:
        exit_layers: The E exit layers, ascending.
        num_layers: Decoder layers of the base model.
        scores: (N, E) float32 exit scores.
        losses: (N, E + 1) float32, negative log-likelihood of the token in nats; the full model's last.
        agrees: (N, E + 1) bool, whether the top token is the full model's.
        confidences: (N, E) float32, the exit head's largest probability (CALM's score, arXiv 2207.07061).
        document_ids: (N,) document of each token.
    """

    exit_layers: list[int]
    num_layers: int
    scores: Tensor
    losses: Tensor
    agrees: Tensor
    confidences: Tensor
    document_ids: Tensor

    def row(self, exit_threshold: float | None, confidence: float) -> dict[str, Any]:
        """Measure one threshold; `None` is the base model.

        Returns:
            Perplexity, its ratio to the base model's, the share of tokens whose top token is the base model's, and the
            mean depth over the number of layers, each with its value and interval; and the share of tokens by exit
            layer. Ready for JSON.
        """
        last = len(self.exit_layers)
        threshold = float("inf") if exit_threshold is None else exit_threshold
        indices = exit_indices(self.scores, threshold)[:, None]
        depths = exit_depths(indices[:, 0], self.exit_layers, self.num_layers)
        per_token = {
            "tokens": torch.ones_like(indices[:, 0]),
            "base_loss": self.losses[:, last],
            "loss": self.losses.gather(1, indices)[:, 0],
            "agrees": self.agrees.gather(1, indices)[:, 0],
            "depth": depths.double() / self.num_layers,
        }
        _, document = self.document_ids.unique(return_inverse=True)
        columns = {name: torch.bincount(document, weights=values.double()) for name, values in per_token.items()}
        bootstrap = Bootstrap(columns, confidence)
        row = {
            "exit_threshold": exit_threshold,
            "perplexity": bootstrap.figure(lambda sums: (sums["loss"] / sums["tokens"]).exp()),
        }
        if exit_threshold is None:
            return row
        shares = torch.bincount(indices[:, 0], minlength=last + 1).double() / len(indices)
        return row | {
            "ratio": bootstrap.figure(lambda sums: ((sums["loss"] - sums["base_loss"]) / sums["tokens"]).exp()),
            "agreement": bootstrap.figure(lambda sums: sums["agrees"] / sums["tokens"], limits=(0.0, 1.0)),
            "depth_fraction": bootstrap.figure(lambda sums: sums["depth"] / sums["tokens"], limits=(0.0, 1.0)),
            "exit_rates": {str(layer): float(shares[i]) for i, layer in enumerate(self.exit_layers)},
        }


def read_texts(
    dataset: object, tokenizer: PreTrainedTokenizerBase, *, samples: int, max_length: int, seed: int
) -> tuple[list[Document], int]:
    """Draw documents as calibration does, all of whose tokens count but the first; of a chat, the last answer's.

    Returns:
        The documents, and the number of rows that could not be used.

    Raises:
        CalibrationError: The data cannot be read.
        MissingPackageError: A package that reads this kind of data is not installed.
    """
    documents, num_skipped = read_documents(dataset, tokenizer, samples=samples, max_length=max_length, seed=seed)
    whole = [Document(one.tokens, first=0) if one.first <= 1 else one for one in documents]  # 1 is the mark of a text
    return whole, num_skipped


def score_texts(
    model: PreTrainedModel,
    routers: TIDERouters,
    documents: Sequence[Document],
    *,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
) -> TextScores:
    """Read documents once and score what every exit layer says to each of their tokens.

    Args:
        model: The base model, attached or not.
        routers: Its routers; they are not touched.
        documents: From `read_texts`.
        batch_size: Most documents a forward pass.
        advance: Told the number of documents done.

    Returns:
        The scores, on the CPU.
    """
    structure = find_structure(model)
    unembed = Unembed(model, structure)
    routers = copy.deepcopy(routers).place(input_device(model), model.dtype)  # the caller's may be in use elsewhere
    reader = StateReader(model, structure, unembed, routers.exit_layers)
    parts = []
    plan = plan_batches(documents, batch_size)
    with full_depth(model):
        for rows, batch in zip(plan, reader.read(token_batch(documents, rows) for rows in plan), strict=True):
            parts.append(_score_batch(unembed, routers, batch))
            advance(len(rows))
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    return TextScores(routers.exit_layers, structure.num_layers, *columns)


@torch.no_grad()
def _score_batch(unembed: Unembed, routers: TIDERouters, batch: StateBatch) -> tuple[Tensor, ...]:
    """Scores, losses, agreement, confidence and document of the tokens that count, on the CPU."""
    has_next = batch.counted.clone()
    has_next[:-1] &= batch.document_ids[:-1] == batch.document_ids[1:]
    has_next[-1] = False
    targets = batch.tokens.roll(-1)[has_next]
    batch = batch.select(has_next)
    scores = exit_scores(unembed, routers, batch.hidden_states, targets.device)
    read = [_losses(unembed, states, targets) for states in _heads(routers, batch)]
    losses, tops, confidences = (torch.stack(column, dim=1) for column in zip(*read, strict=True))
    agrees = tops == batch.top_tokens[:, None]
    columns = (scores, losses, agrees, confidences[:, :-1], batch.document_ids)
    return tuple(column.cpu() for column in columns)


def _heads(routers: TIDERouters, batch: StateBatch) -> Iterator[Tensor]:
    """What each exit head makes of its layer's states, then the final states."""
    for layer in routers.exit_layers:
        states = batch.hidden_states[layer]
        yield on_device(routers[layer], states).head(states)
    yield batch.final_states


def _losses(unembed: Unembed, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihoods of `targets`, top tokens and their probabilities, some positions at a time."""
    rows = max(1, SLICE_ELEMENTS // (ARRAYS_PER_LOGIT * unembed.structure.vocab_size))
    losses, tops, confidences = [], [], []
    for part, wanted in zip(states.split(rows), targets.split(rows), strict=True):
        logits = unembed(part).float().to(targets.device)
        losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
        highest, top = logits.max(dim=-1)
        tops.append(top)
        confidences.append((highest - logits.logsumexp(dim=-1)).exp())
    return torch.cat(losses), torch.cat(tops), torch.cat(confidences)
