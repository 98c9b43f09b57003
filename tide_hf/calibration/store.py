"""Hidden states in shards on the disk: written one batch of documents at a time, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import Document, Splits, TokenBatch, plan_batches, token_batch
from .hidden_states import PLAIN_FIELDS, StateBatch, StateReader
from .work_folder import WorkFolder

UNROUNDED_SPLIT = "certify"  # what is promised is measured on states as the model computes them
BYTES_PER_POSITION = 32  # of all that is no state


@dataclass(frozen=True)
class Shard:
    """One batch of a split's documents.

    Attributes:
        split: Name of the split.
        number: Of the batch within it.
        rows: Positions of its documents in the split.
    """

    split: str
    number: int
    rows: list[int]

    @property
    def name(self) -> str:
        """Of its file."""
        return f"states/{self.split}-{self.number:05d}"


class StateStore:
    """The hidden states of all documents, in a work folder.

    States of the splits that fit and tune are rounded to bfloat16 where the model computes in float32; tokens and
    labels come from unrounded ones.

    Args:
        work: The folder.
        splits: The documents.
        batch_size: Most documents a shard.
        exit_layers: Layers whose states are kept.
        dtype: The model's.
    """

    def __init__(
        self, work: WorkFolder, splits: Splits, batch_size: int, exit_layers: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.work = work
        self.splits = splits
        self.exit_layers = list(exit_layers)
        self.dtype = dtype
        self._documents: dict[str, list[Document]] = dict(splits.items())
        self._shards = {
            split: [Shard(split, number, rows) for number, rows in enumerate(plan_batches(documents, batch_size))]
            for split, documents in splits.items()
        }

    def shards(self, *splits: str) -> list[Shard]:
        """The shards of these splits, or of all."""
        return [shard for split in splits or tuple(self._shards) for shard in self._shards[split]]

    def text(self, shard: Shard) -> TokenBatch:
        """What the model reads to make a shard."""
        return token_batch(self._documents[shard.split], shard.rows)

    def missing_bytes(self, hidden_size: int) -> int:
        """Bytes that the shards take which are not there yet."""
        total = 0
        for shard in self.shards():
            if not self.work.has(shard.name):
                positions = sum(len(self._documents[shard.split][row].tokens) for row in shard.rows)
                width = (len(self.exit_layers) + 1) * hidden_size * self._kept_dtype(shard.split).itemsize
                total += positions * (width + BYTES_PER_POSITION)
        return total

    def write(self, shard: Shard, reader: StateReader) -> None:
        """Run the model over a shard's documents and keep what its layers compute.

        Raises:
            CalibrationError: A state is NaN or infinite, or the disk is full.
        """
        (batch,) = reader.read([self.text(shard)])
        dtype = self._kept_dtype(shard.split)
        tensors = {name: getattr(batch, name) for name in PLAIN_FIELDS}
        tensors["final_states"] = batch.final_states.to(dtype)
        tensors |= {_key(layer): states.to(dtype) for layer, states in batch.hidden_states.items()}
        self.work.write(shard.name, tensors)

    def read(self, shard: Shard, layers: Sequence[int] | None = None) -> StateBatch:
        """Read a shard.

        Args:
            shard: The shard.
            layers: Exit layers whose states are wanted; default: all.

        Returns:
            Whole documents, on the CPU, in the dtype in which they were kept.
        """
        wanted = {_key(layer): layer for layer in (self.exit_layers if layers is None else layers)}
        tensors = self.work.read(shard.name, [*PLAIN_FIELDS, *wanted])
        states = {layer: tensors.pop(key) for key, layer in wanted.items()}
        return StateBatch(states, **tensors)

    def batches(self, split: str, layers: Sequence[int] | None = None) -> Iterator[StateBatch]:
        """Yield whole documents, shard by shard, in the model's dtype; see [`read`]."""
        for shard in self.shards(split):
            yield self.read(shard, layers).to(torch.device("cpu"), self.dtype)

    def num_counted(self, split: str) -> int:
        """Positions of a split that calibration looks at."""
        return sum(document.num_positions for document in self._documents[split])

    def sample(self, split: str, layers: Sequence[int], capacity: int, seed: int) -> StateBatch:
        """A random part of the counted positions, so that memory does not grow with the text.

        Args:
            split: Of the documents.
            layers: Exit layers whose states are wanted.
            capacity: Most positions.
            seed: Of the choice.

        Returns:
            Positions on the CPU, in the dtype in which they were kept.
        """
        total = self.num_counted(split)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.zeros(total, dtype=torch.bool)
        chosen[torch.randperm(total, generator=generator)[:capacity]] = True
        parts, seen = [], 0
        for shard in self.shards(split):
            batch = self.read(shard, layers)
            counted = batch.counted.nonzero()[:, 0]
            parts.append(batch.select(counted[chosen[seen : seen + len(counted)]]))
            seen += len(counted)
        return StateBatch.concatenate(parts)

    def count_tokens(self, split: str, vocab_size: int) -> tuple[Tensor, Tensor]:
        """How often each token stands in the text, and how often the full model would choose it next.

        Returns:
            Two tensors (vocab_size,); the second looks at counted positions alone.
        """
        read, chosen = torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.long)
        for shard in self.shards(split):
            tensors = self.work.read(shard.name, ["tokens", "top_tokens", "counted"])
            read += torch.bincount(tensors["tokens"], minlength=vocab_size)[:vocab_size]
            chosen += torch.bincount(tensors["top_tokens"][tensors["counted"]], minlength=vocab_size)
        return read, chosen

    def _kept_dtype(self, split: str) -> torch.dtype:
        return torch.bfloat16 if self.dtype == torch.float32 and split != UNROUNDED_SPLIT else self.dtype


def _key(layer: int) -> str:
    return f"hidden_states.{layer}"
