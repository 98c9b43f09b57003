"""Which positions may leave early: where the exit head's top token is the full model's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import CalibrationError, describe
from ..unembed import Unembed
from .hidden_states import top_tokens


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
    return top_tokens(unembed, head(hidden_states)).to(full_model.device) == full_model
