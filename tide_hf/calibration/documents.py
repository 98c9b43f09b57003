"""Documents as token ids: splits, and batches for the forward pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
class TokenBatch:
    """Right-padded documents.

    Attributes:
        input_ids: (rows, length).
        attention_mask: (rows, length), 1 where there is a token.
        counted: (rows, length), True at counted positions.
    """

    input_ids: Tensor
    attention_mask: Tensor
    counted: Tensor


def num_positions(documents: Sequence[Document]) -> int:
    """Counted positions of all documents."""
    return sum(document.num_positions for document in documents)


def split_documents(documents: Sequence[Document], seed: int) -> dict[str, list[Document]]:
    """Split documents at random into `"fit"` (heads and routers), `"tune"` (their scores) and `"certify"`.

    Their proportions are `SHARES`; what exceeds `MOST` goes to the fit split.

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
    rest = random.Random(seed).sample(list(documents), len(documents))
    splits = {}
    for split in ("tune", "certify"):
        count = min(max(1, round(SHARES[split] * len(documents))), MOST[split])
        splits[split], rest = rest[:count], rest[count:]
    return {"fit": rest, **splits}


def plan_batches(documents: Sequence[Document], batch_size: int) -> list[list[int]]:
    """Group documents of similar length into batches of indices, at most `batch_size` and `TOKENS_PER_BATCH` each."""
    batches: list[list[int]] = []
    for i in sorted(range(len(documents)), key=lambda i: len(documents[i].tokens)):
        last = batches[-1] if batches else []
        if 0 < len(last) < batch_size and (len(last) + 1) * len(documents[i].tokens) <= TOKENS_PER_BATCH:
            last.append(i)
        else:
            batches.append([i])
    return batches


def token_batch(documents: Sequence[Document], rows: Sequence[int]) -> TokenBatch:
    """Right-pad the documents at indices `rows` into one batch.

    Padding on the right leaves positions as they are, and causal attention never reaches it.
    """
    chosen = [documents[i] for i in rows]
    input_ids = pad_sequence([torch.tensor(document.tokens) for document in chosen], batch_first=True)
    positions = torch.arange(input_ids.shape[1])
    is_token = positions < torch.tensor([len(document.tokens) for document in chosen])[:, None]
    counted = is_token & (positions >= torch.tensor([document.first for document in chosen])[:, None])
    return TokenBatch(input_ids, is_token.long(), counted)
