"""Which positions may leave early: where the exit head's top token is the full model's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import CalibrationError, describe
from ..unembed import Unembed
from .hidden_states import StateBatch, top_tokens


def check_labels(labels: object) -> None:
    """Refuse labels that are not built."""
    if labels != "agreement":
        raise CalibrationError(
            describe(
                "these labels are not built yet",
                got=f"labels={labels!r}",
                expected="'agreement'; 'cosine' and 'kl' are planned",
                do="Leave labels out.",
            )
        )


def router_labels(labels: str, unembed: Unembed, head: nn.Module, batch: StateBatch, exit_layer: int) -> Tensor:
    """Tell a router what to predict.

    Args:
        labels: Their kind.
        unembed: The base model's unembedding.
        head: The exit head of `exit_layer`.
        batch: N positions, in the model's dtype.
        exit_layer: The layer.

    Returns:
        (N,) bool, on the device of the states.
    """
    check_labels(labels)
    return agreement_labels(unembed, head, batch.hidden_states[exit_layer], batch.top_tokens)


@torch.no_grad()
def agreement_labels(unembed: Unembed, head: nn.Module, hidden_states: Tensor, full_model: Tensor) -> Tensor:
    """Tell where `head` and the full model choose the same token.

    Args:
        unembed: The base model's unembedding.
        head: The exit head of the layer that the states come from.
        hidden_states: (N, hidden_size) before the final norm, in the model's dtype.
        full_model: (N,) the full model's top tokens.

    Returns:
        (N,) bool, on the device of `hidden_states`.
    """
    return top_tokens(unembed, head(hidden_states)).to(hidden_states.device) == full_model.to(hidden_states.device)
