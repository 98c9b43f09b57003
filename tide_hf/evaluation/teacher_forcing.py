"""Teacher-forced early exit: the exit layer and logits at each position of a given text, from one full pass.

Every position, even in a prompt, is treated as a decode step. Attention sees exact K/V, as in `post_hoc` and
`early_exit`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..base_model.structure import find_structure, input_device
from ..base_model.unembed import Unembed
from ..calibration.states import captured_states, full_depth
from ..calibration.threshold import exit_depths, exit_indices
from ..depth.gates import on_device
from ..generation import TIDEGenerationMixin
from ..routers.routers import TIDERouters


@dataclass(frozen=True)
class ExitLogits:
    """Logits and exit layer at every position of a text."""

    logits: Tensor  # (rows, length, vocab_size) of the next token, in the model's dtype
    exit_layers: Tensor  # (rows, length) int64, layers executed for the logits; `num_layers` where no exit is taken


@torch.no_grad()
def scores_by_layer(
    unembed: Unembed, routers: TIDERouters, states: Mapping[int, Tensor], device: torch.device
) -> Tensor:
    """Exit scores (..., E), float32 on `device`, of `states` (..., hidden_size) before the final norm."""
    columns = []
    for layer in routers.exit_layers:
        point = on_device(routers[layer], states[layer])
        columns.append(unembed.route(point.router, states[layer]).to(device))
    return torch.stack(columns, dim=-1)


@torch.no_grad()
def exit_logits(
    model: PreTrainedModel, routers: TIDERouters, input_ids: Tensor, *, exit_threshold: float, **inputs: Any
) -> ExitLogits:
    """Compute logits at every position of a text, from the earliest exit layer whose score reaches the threshold.

    Args:
        model: The base model, with or without TIDE attached.
        routers: The model's routers, placed beside the model: `attach` does that; otherwise call
            `routers.place(input_device(model), model.dtype)`.
        input_ids: (rows, length) token ids; right padding needs no mask.
        exit_threshold: Exit where `score >= exit_threshold`; above 1 gives the base model's own logits.
        **inputs: For the model's forward: `attention_mask`, `position_ids`.

    Returns:
        The logits, and the exit layer that each position's logits come from.
    """
    structure = find_structure(model)
    unembed = model._tide.unembed if isinstance(model, TIDEGenerationMixin) else Unembed(model, structure)
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with full_depth(model), captured_states(structure, routers.exit_layers) as states:
        model(input_ids=input_ids.to(input_device(model)), **inputs, use_cache=False, **options)
    final = states.pop(structure.num_layers)
    indices = exit_indices(scores_by_layer(unembed, routers, states, final.device), exit_threshold)
    read = final.clone()
    for index, layer in enumerate(routers.exit_layers):
        exits = indices == index
        if exits.any():
            hidden_states = states[layer][exits.to(states[layer].device)]
            read[exits] = on_device(routers[layer], hidden_states).head(hidden_states).to(read)
    return ExitLogits(unembed(read), exit_depths(indices, routers.exit_layers, structure.num_layers))
