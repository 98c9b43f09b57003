"""What a base model computes on text: its hidden states at the exit layers and its own top tokens, batch by batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import CalibrationError, describe
from ..structure import DecoderStructure
from ..unembed import Unembed
from .data import TokenBatch

SLICE_ELEMENTS = 2**25  # logits computed at once: 128 MB in float32


@dataclass(frozen=True)
class StateBatch:
    """What happened at N positions of the text.

    Attributes:
        hidden_states: By exit layer, (N, hidden_size) in the model's dtype, before the final norm.
        final_states: (N, hidden_size), output of the last layer, before the final norm.
        top_tokens: (N,) the full model's greedy choices.
        document_ids: (N,) which document each position belongs to.
    """

    hidden_states: dict[int, Tensor]
    final_states: Tensor
    top_tokens: Tensor
    document_ids: Tensor

    def __len__(self) -> int:
        return len(self.top_tokens)

    def select(self, mask: Tensor) -> StateBatch:
        """The positions where `mask` (N,) is True, on the CPU."""
        mask = mask.to(self.top_tokens.device)
        return StateBatch(
            {layer: states[mask].cpu() for layer, states in self.hidden_states.items()},
            self.final_states[mask].cpu(),
            self.top_tokens[mask].cpu(),
            self.document_ids[mask].cpu(),
        )


class Reservoir:
    """Keeps a random part of all positions, so that memory does not grow with the text.

    Args:
        num_positions: Positions that will come.
        capacity: Positions to keep.
        seed: Of the choice.
    """

    def __init__(self, num_positions: int, capacity: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._chosen = torch.zeros(num_positions, dtype=torch.bool)
        self._chosen[torch.randperm(num_positions, generator=generator)[:capacity]] = True
        self._seen = 0
        self._kept: list[StateBatch] = []

    def add(self, batch: StateBatch) -> None:
        """Take what is to be kept of the next positions."""
        self._kept.append(batch.select(self._chosen[self._seen : self._seen + len(batch)]))
        self._seen += len(batch)

    def states(self) -> StateBatch:
        """All that was kept, on the CPU; the reservoir is empty afterwards."""
        kept, self._kept = self._kept, []
        return StateBatch(
            {layer: torch.cat([part.hidden_states[layer] for part in kept]) for layer in kept[0].hidden_states},
            torch.cat([part.final_states for part in kept]),
            torch.cat([part.top_tokens for part in kept]),
            torch.cat([part.document_ids for part in kept]),
        )


class StateReader:
    """Runs a base model over text and yields what its layers compute.

    Args:
        model: The base model, at full depth and in evaluation mode.
        structure: Its structure.
        unembed: Its unembedding.
        exit_layers: Numbers of executed layers after which states are wanted.
    """

    def __init__(
        self, model: PreTrainedModel, structure: DecoderStructure, unembed: Unembed, exit_layers: Sequence[int]
    ) -> None:
        self.model = model
        self.structure = structure
        self.unembed = unembed
        self.exit_layers = list(exit_layers)
        self._options: dict[str, Any] = {"use_cache": False}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._options["logits_to_keep"] = 1  # logits are computed from the states, a slice at a time

    def read(self, batches: Iterable[TokenBatch]) -> Iterator[StateBatch]:
        """Yield the states of `batches`, one by one, at the positions that count; nothing outlives its batch.

        Raises:
            CalibrationError: A state is NaN or infinite.
        """
        for batch in batches:
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            with torch.no_grad(), _capture(self.structure, self.exit_layers) as captured:
                self.model(**{name: ids.to(self.model.device) for name, ids in inputs.items()}, **self._options)
            device = captured[self.structure.num_layers].device
            counts = batch.counts.to(device)
            states = {depth: state.to(device)[counts] for depth, state in captured.items()}
            _check_finite(states)
            final_states = states.pop(self.structure.num_layers)
            document_ids = batch.document_ids[:, None].expand_as(batch.counts)[batch.counts].to(device)
            yield StateBatch(states, final_states, top_tokens(self.unembed, final_states), document_ids)


@torch.no_grad()
def top_tokens(unembed: Unembed, hidden_states: Tensor) -> Tensor:
    """Map hidden states to the tokens with the highest logits, a slice of positions at a time.

    Args:
        unembed: The base model's unembedding.
        hidden_states: (N, hidden_size) before the final norm, in the model's dtype.

    Returns:
        (N,) tokens.
    """
    rows = max(1, SLICE_ELEMENTS // unembed.structure.vocab_size)
    return torch.cat([unembed(part).argmax(dim=-1) for part in hidden_states.split(rows)])


@contextmanager
def _capture(structure: DecoderStructure, exit_layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect what the layers return, by the number of layers executed; the hooks are always removed."""
    captured: dict[int, Tensor] = {}

    def keep(depth: int, output: Any) -> None:
        captured[depth] = output[0] if isinstance(output, tuple) else output

    handles = []
    try:
        for depth in (*exit_layers, structure.num_layers):
            handles.append(
                structure.layers[depth - 1].register_forward_hook(
                    lambda _module, _args, output, depth=depth: keep(depth, output)
                )
            )
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _check_finite(states: dict[int, Tensor]) -> None:
    for depth, state in states.items():
        if not bool(torch.isfinite(state).all()):
            raise CalibrationError(
                describe(
                    f"the base model's hidden states after layer {depth} cannot be used",
                    got="NaN or infinite values",
                    expected="finite numbers",
                    do="Load the model in float32 or bfloat16, and check its weights.",
                )
            )
