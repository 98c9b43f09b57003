"""Documents as token ids: splits, batches for the forward pass, and their form in a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..common.errors import CalibrationError, describe

SHARES = {"fit": 0.5, "tune": 0.1, "certify": 0.4}  # certifying 2% at 95% takes at least 149 documents
MOST = {"tune": 150, "certify": 500}  # documents; beyond these the heads profit more from further text
TOKENS_PER_BATCH = 16_384  # padding included


@dataclass(frozen=True)
class Document:
    """One text as token ids.

    Attributes:
        tokens: The model's input.
        first: First counted position; those before it are prompt and not used for fitting or measuring.
    """

    tokens: list[int]
    first: int

    @property
    def num_positions(self) -> int:
        """Number of counted positions."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Splits:
    """Disjoint documents to fit heads and routers, tune their scores, and certify the threshold."""

    fit: list[Document]
    tune: list[Document]
    certify: list[Document]

    def items(self) -> list[tuple[str, list[Document]]]:
        """(name, documents) of each split."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded documents.

    Attributes:
        input_ids: (rows, length).
        attention_mask: (rows, length), 1 where there is a token.
        counted: (rows, length), True at counted positions.
        document_ids: (rows,) index of each document in its list.
    """

    input_ids: Tensor
    attention_mask: Tensor
    counted: Tensor
    document_ids: Tensor


def num_positions(documents: Sequence[Document]) -> int:
    """Counted positions of all documents."""
    return sum(document.num_positions for document in documents)


def split_documents(documents: Sequence[Document], seed: int) -> Splits:
    """Split documents at random in the proportions of `SHARES`; what exceeds `MOST` goes to the fit split.

    Raises:
        CalibrationError: There are fewer than three documents.
    """
    if len(documents) < len(SHARES):
        raise CalibrationError(
            describe(
                "too few documents to fit, tune and certify on different ones",
                got=len(documents),
                expected=f"at least {len(SHARES)}, better several hundred",
                do="Pass more texts, or raise samples.",
            )
        )
    shuffled = random.Random(seed).sample(list(documents), len(documents))
    num_tune, num_certify = (
        min(max(1, round(SHARES[split] * len(shuffled))), MOST[split]) for split in ("tune", "certify")
    )
    tune_end = num_tune + num_certify
    return Splits(fit=shuffled[tune_end:], tune=shuffled[:num_tune], certify=shuffled[num_tune:tune_end])


def plan_batches(documents: Sequence[Document], batch_size: int) -> list[list[int]]:
    """Group documents of similar length into batches for the forward pass.

    Args:
        documents: The documents.
        batch_size: Most documents per batch; `TOKENS_PER_BATCH` limits batches of long ones.

    Returns:
        For each batch, indices into `documents`.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(documents)), key=lambda i: len(documents[i].tokens)):
        last = batches[-1] if batches else []
        fits = 0 < len(last) < batch_size and (len(last) + 1) * len(documents[i].tokens) <= TOKENS_PER_BATCH
        if fits:
            last.append(i)
        else:
            batches.append([i])
    return batches


def token_batch(documents: Sequence[Document], rows: Sequence[int]) -> TokenBatch:
    """Right-pad some of the documents into one batch.

    Padding on the right leaves positions as they are, and causal attention never reaches it.

    Args:
        documents: The documents.
        rows: Indices of those in the batch.
    """
    shape = (len(rows), max(len(documents[i].tokens) for i in rows))
    input_ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    counted = torch.zeros(shape, dtype=torch.bool)
    for row, i in enumerate(rows):
        length = len(documents[i].tokens)
        input_ids[row, :length] = torch.tensor(documents[i].tokens)
        mask[row, :length] = 1
        counted[row, documents[i].first : length] = True
    return TokenBatch(input_ids, mask, counted, torch.tensor(rows))


def pack_documents(documents: Sequence[Document]) -> dict[str, Tensor]:
    """Documents as tensors, for a safetensors file."""
    return {
        "tokens": torch.tensor([token for document in documents for token in document.tokens], dtype=torch.long),
        "lengths": torch.tensor([len(document.tokens) for document in documents], dtype=torch.long),
        "first": torch.tensor([document.first for document in documents], dtype=torch.long),
    }


def unpack_documents(tensors: dict[str, Tensor]) -> list[Document]:
    """Inverse of [`pack_documents`]."""
    parts = tensors["tokens"].split(tensors["lengths"].tolist())
    return [Document(part.tolist(), first) for part, first in zip(parts, tensors["first"].tolist(), strict=True)]
