"""Hidden states of the base model on documents: computed batch by batch, stored on disk in shards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..base_model.hooks import hook_layers
from ..base_model.structure import DecoderStructure, evaluating, input_device, last_position
from ..base_model.unembed import Unembed, greedy_tokens
from ..common.errors import CalibrationError
from ..generation import TIDEGenerationMixin
from .documents import Document, num_positions, plan_batches, token_batch
from .work_folder import WorkFolder

SLICE_ELEMENTS = 2**25  # logits per slice: 128 MB in float32
PLAIN_FIELDS = ("final_states", "top_tokens", "tokens", "counted", "document_ids")
UNROUNDED_SPLIT = "certify"  # the guarantee is about the model's own, unrounded states
BYTES_PER_POSITION = 32  # upper bound for token, top token, mask and document id


@contextmanager
def full_depth(model: PreTrainedModel) -> Iterator[None]:
    """Run `model` in evaluation mode without TIDE attached; restore its mode and class afterwards."""
    attached = type(model)
    if isinstance(model, TIDEGenerationMixin):
        model.__class__ = model._tide.base_class  # gates are transparent while no run is active
    try:
        with evaluating(model):
            yield
    finally:
        model.__class__ = attached


@dataclass(frozen=True)
class StateBatch:
    """The base model's states and top tokens at N positions of concatenated documents."""

    hidden_states: dict[int, Tensor]  # by exit layer, (N, hidden_size), before the final norm
    final_states: Tensor  # (N, hidden_size), output of the last layer, before the final norm
    top_tokens: Tensor  # (N,) the full model's greedy next tokens; 0 where not counted
    tokens: Tensor  # (N,) input tokens
    counted: Tensor  # (N,) bool, False in prompts
    document_ids: Tensor  # (N,) index of each position's document in its split

    def __len__(self) -> int:
        return len(self.top_tokens)

    def select(self, index: Tensor) -> StateBatch:
        """The positions of `index`, a mask (N,) or indices (M,)."""
        index = index.to(self.top_tokens.device)
        return self._map(lambda tensor: tensor[index])

    def only_counted(self) -> StateBatch:
        """The counted positions."""
        return self.select(self.counted)

    def to(self, device: torch.device, dtype: torch.dtype) -> StateBatch:
        """A copy with all tensors on `device`, states in `dtype`."""
        moved = self._map(lambda tensor: tensor.to(device))
        states = {layer: state.to(dtype) for layer, state in moved.hidden_states.items()}
        return replace(moved, hidden_states=states, final_states=moved.final_states.to(dtype))

    @classmethod
    def concatenate(cls, parts: Sequence[StateBatch]) -> StateBatch:
        """Concatenate batches that have the same exit layers."""
        rest = {name: torch.cat([getattr(part, name) for part in parts]) for name in PLAIN_FIELDS}
        layers = parts[0].hidden_states
        return cls({layer: torch.cat([part.hidden_states[layer] for part in parts]) for layer in layers}, **rest)

    def _map(self, change: Any) -> StateBatch:
        rest = {name: change(getattr(self, name)) for name in PLAIN_FIELDS}
        return StateBatch({layer: change(states) for layer, states in self.hidden_states.items()}, **rest)


class StateReader:
    """Computes a base model's states after each of `exit_layers`; to be used inside [`full_depth`]."""

    def __init__(
        self, model: PreTrainedModel, structure: DecoderStructure, unembed: Unembed, exit_layers: Sequence[int]
    ) -> None:
        self.model, self.structure, self.unembed = model, structure, unembed
        self.exit_layers = list(exit_layers)
        self._options: dict[str, Any] = {"use_cache": False}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._options["logits_to_keep"] = 1  # these logits are unused: top_tokens computes logits in slices

    def read(self, documents: Sequence[Document], rows: Sequence[int]) -> StateBatch:
        """The states of the documents at indices `rows`, in one forward pass."""
        batch, most = token_batch(documents, rows), last_position(self.model.config.get_text_config())
        if most is not None and batch.input_ids.shape[1] > most:
            raise CalibrationError(
                "a document is longer than the model has positions for",
                got=f"{batch.input_ids.shape[1]} tokens",
                expected=f"at most {most}",
                do="Pass a smaller max_length, or leave long prompts out.",
            )
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        with torch.no_grad(), captured_states(self.structure, self.exit_layers) as captured:
            self.model(**{name: ids.to(input_device(self.model)) for name, ids in inputs.items()}, **self._options)
        device = captured[self.structure.num_layers].device
        is_token = batch.attention_mask.bool()
        states = {depth: state.to(device)[is_token.to(device)] for depth, state in captured.items()}
        _check_finite(states)
        final_states, counted = states.pop(self.structure.num_layers), batch.counted[is_token].to(device)
        top = torch.zeros(len(counted), dtype=torch.long, device=device)
        top[counted] = top_tokens(self.unembed, final_states[counted]).to(device)
        return StateBatch(
            states,
            final_states,
            top,
            tokens=batch.input_ids[is_token].to(device),
            counted=counted,
            document_ids=torch.tensor(rows)[:, None].expand_as(is_token)[is_token].to(device),
        )


@torch.no_grad()
def top_tokens(unembed: Unembed, hidden_states: Tensor) -> Tensor:
    """Greedy tokens (N,) of hidden states (N, hidden_size) before the final norm, a slice of positions at a time."""
    rows = max(1, SLICE_ELEMENTS // unembed.structure.vocab_size)
    return torch.cat([greedy_tokens(unembed(part)) for part in hidden_states.split(rows)])


@contextmanager
def captured_states(structure: DecoderStructure, exit_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect layer outputs through forward hooks, keyed by the number of executed layers."""
    captured: dict[int, Tensor] = {}

    def store(depth: int, output: Any) -> None:
        captured[depth] = output[0] if isinstance(output, tuple) else output

    with hook_layers(structure, (*exit_layers, structure.num_layers), store):
        yield captured


def _check_finite(states: dict[int, Tensor]) -> None:
    for depth, state in states.items():
        if not bool(torch.isfinite(state).all()):
            raise CalibrationError(
                f"the base model's hidden states after layer {depth} cannot be used",
                got="NaN or infinite values",
                expected="finite numbers",
                do="Load the model in float32 or bfloat16, and check its weights.",
            )


@dataclass(frozen=True)
class Shard:
    """One batch of a split's documents: the batch's number, and `rows`, the documents' indices in the split."""

    split: str
    number: int
    rows: list[int]

    @property
    def name(self) -> str:
        """Name of the shard's unit in the work folder."""
        return f"states/{self.split}-{self.number:05d}"


class StateStore:
    """The hidden states of all documents, as shards in a work folder.

    Float32 states are stored in bfloat16, except in the certify split. Top tokens are computed before this rounding.
    """

    def __init__(
        self,
        work: WorkFolder,
        splits: dict[str, list[Document]],
        batch_size: int,
        exit_layers: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.work = work
        self.splits = splits
        self.exit_layers = list(exit_layers)
        self.dtype = dtype
        self._shards = {
            split: [Shard(split, number, rows) for number, rows in enumerate(plan_batches(documents, batch_size))]
            for split, documents in splits.items()
        }

    def shards(self, *splits: str) -> list[Shard]:
        """The shards of the given splits; by default of all splits."""
        return [shard for split in splits or tuple(self._shards) for shard in self._shards[split]]

    def missing_bytes(self, hidden_size: int) -> int:
        """Disk space, in bytes, that the shards not yet written will take."""
        total = 0
        for shard in self.shards():
            if not self.work.has(shard.name):
                positions = sum(len(self.splits[shard.split][row].tokens) for row in shard.rows)
                width = (len(self.exit_layers) + 1) * hidden_size * self._stored_dtype(shard.split).itemsize
                total += positions * (width + BYTES_PER_POSITION)
        return total

    def write(self, shard: Shard, reader: StateReader) -> None:
        """Run the model on a shard's documents and store its states."""
        batch = reader.read(self.splits[shard.split], shard.rows)
        dtype = self._stored_dtype(shard.split)
        tensors = {name: getattr(batch, name) for name in PLAIN_FIELDS}
        tensors["final_states"] = batch.final_states.to(dtype)
        tensors |= {_key(layer): states.to(dtype) for layer, states in batch.hidden_states.items()}
        self.work.write(shard.name, tensors)

    def read(self, shard: Shard, layers: Sequence[int] | None = None) -> StateBatch:
        """Read a shard: whole documents, with the states at `layers` (default: all), on the CPU in the stored dtype."""
        wanted = {_key(layer): layer for layer in (self.exit_layers if layers is None else layers)}
        tensors = self.work.read(shard.name, [*PLAIN_FIELDS, *wanted])
        states = {layer: tensors.pop(key) for key, layer in wanted.items()}
        return StateBatch(states, **tensors)

    def batches(self, split: str, layers: Sequence[int] | None = None) -> Iterator[StateBatch]:
        """Yield whole documents, shard by shard, in the model's dtype."""
        for shard in self.shards(split):
            yield self.read(shard, layers).to(torch.device("cpu"), self.dtype)

    def num_counted(self, split: str) -> int:
        """Number of counted positions of a split."""
        return num_positions(self.splits[split])

    def sample(self, split: str, layers: Sequence[int], capacity: int, seed: int) -> StateBatch:
        """Draw a random sample of a split's counted positions, at most `capacity`, to bound memory.

        The sample is on the CPU, in the stored dtype, with the states at `layers`.
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
        """Count each token's occurrences in the text, and as top token at counted positions; (vocab_size,) each."""
        read, chosen = torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.long)
        for shard in self.shards(split):
            tensors = self.work.read(shard.name, ["tokens", "top_tokens", "counted"])
            read += torch.bincount(tensors["tokens"], minlength=vocab_size)[:vocab_size]
            chosen += torch.bincount(tensors["top_tokens"][tensors["counted"]], minlength=vocab_size)
        return read, chosen

    def _stored_dtype(self, split: str) -> torch.dtype:
        return torch.bfloat16 if self.dtype == torch.float32 and split != UNROUNDED_SPLIT else self.dtype


def _key(layer: int) -> str:
    return f"hidden_states.{layer}"
