"""Documents as token ids: splits, batches for the forward pass, and their form in a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..common.errors import CalibrationError, describe

SHARES = {"fit": 0.5, "tune": 0.1, "certify": 0.4}  # certifying 2% at 95% takes at least 149 documents
MOST = {"tune": 150, "certify": 500}  # documents, beyond which more text does more good to heads
TOKENS_PER_BATCH = 16_384  # of a forward pass over long documents, padding included


@dataclass(frozen=True)
class Document:
    """One text, as tokens.

    Attributes:
        tokens: The tokens that the model reads.
        first: Calibration looks at the positions from here on; before it stands a prompt.
    """

    tokens: list[int]
    first: int

    @property
    def num_positions(self) -> int:
        """Positions that calibration looks at."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Splits:
    """Documents that fit the heads and routers, tune their scores, and certify the threshold; disjoint."""

    fit: list[Document]
    tune: list[Document]
    certify: list[Document]

    def items(self) -> list[tuple[str, list[Document]]]:
        """(name, documents) of each."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded documents.

    Attributes:
        input_ids: (rows, length).
        attention_mask: (rows, length), 1 where there is a token.
        counted: (rows, length), True at the positions that calibration looks at.
        document_ids: (rows,) positions of the documents in the list they came from.
    """

    input_ids: Tensor
    attention_mask: Tensor
    counted: Tensor
    document_ids: Tensor


def num_positions(documents: Sequence[Document]) -> int:
    """Positions of all documents that calibration looks at."""
    return sum(document.num_positions for document in documents)


def split_documents(documents: Sequence[Document], seed: int) -> Splits:
    """Split by document, at random, in the shares of `SHARES`; what `MOST` leaves over goes to those that fit.

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
    """Cut documents into batches for the forward pass, those of like length together.

    Args:
        documents: The documents.
        batch_size: Most documents a batch; fewer where they are long (`TOKENS_PER_BATCH`).

    Returns:
        For each batch, positions in `documents`.
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
    """Put some of the documents into right-padded rows.

    Padding stands on the right, so that a position is the same number with and without it; a causal model never
    looks at it from the positions before.

    Args:
        documents: The documents.
        rows: Which of them.
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
    """Documents as tensors, for a file."""
    return {
        "tokens": torch.tensor([token for document in documents for token in document.tokens], dtype=torch.long),
        "lengths": torch.tensor([len(document.tokens) for document in documents], dtype=torch.long),
        "first": torch.tensor([document.first for document in documents], dtype=torch.long),
    }


def unpack_documents(tensors: dict[str, Tensor]) -> list[Document]:
    """What [`pack_documents`] packed."""
    parts = tensors["tokens"].split(tensors["lengths"].tolist())
    return [Document(part.tolist(), first) for part, first in zip(parts, tensors["first"].tolist(), strict=True)]
