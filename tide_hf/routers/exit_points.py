"""Modules of an exit layer: router and exit head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import TIDEConfig


class ExitRouter(nn.Module):
    """Scores whether a token may exit (TIDE, arXiv 2603.21365, section 3)."""

    def __init__(self, hidden_size: int, bottleneck_dim: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, bottleneck_dim)
        self.up = nn.Linear(bottleneck_dim, 1)
        nn.init.zeros_(self.up.weight)  # a fresh router scores 0.5
        nn.init.zeros_(self.up.bias)

    def logits(self, last_hidden_state: Tensor) -> Tensor:
        """(..., D) states after the final norm -> (...) router logits in float32."""
        state = nn.functional.silu(self.down(last_hidden_state.to(self.down.weight.dtype)))
        return self.up(state).squeeze(-1).float()

    def forward(self, last_hidden_state: Tensor) -> Tensor:
        """(..., D) states after the final norm -> (...) exit scores in [0, 1], float32."""
        return torch.sigmoid(self.logits(last_hidden_state))


class ExitHead(nn.Module):
    """Maps the hidden state at an exit layer to a state for the base model's final norm and output head.

    `"identity"` returns the state unchanged, as in the published system. `"linear"` returns `h + A h + b` (as in Tuned
    Lens, arXiv 2303.08112), with A of full rank (`rank=None`) or of rank `rank`.
    """

    def __init__(self, hidden_size: int, strategy: str, rank: int | None) -> None:
        super().__init__()
        self.translator: nn.Module | None = None
        if strategy == "linear":
            last = nn.Linear(hidden_size if rank is None else rank, hidden_size)
            nn.init.zeros_(last.weight)  # a fresh head is the identity
            nn.init.zeros_(last.bias)
            self.translator = last if rank is None else nn.Sequential(nn.Linear(hidden_size, rank, bias=False), last)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states (..., D) at the exit layer to estimates of the last layer's, both before the final norm."""
        if self.translator is None:
            return hidden_states
        first = next(self.translator.parameters())
        return hidden_states + self.translator(hidden_states.to(first.dtype)).to(hidden_states.dtype)


class ExitPoint(nn.Module):
    """Router and exit head of one exit layer."""

    def __init__(self, config: TIDEConfig) -> None:
        super().__init__()
        self.router = ExitRouter(config.hidden_size, config.router_bottleneck_dim)
        self.head = ExitHead(config.hidden_size, config.exit_strategy, config.translator_rank)


def logit_of(log_probabilities: Tensor) -> Tensor:
    """(...) log p -> (...) logit p, finite, in float32."""
    log_probabilities = log_probabilities.float().clamp(max=-1e-6)
    return log_probabilities - torch.log(-torch.expm1(log_probabilities))
