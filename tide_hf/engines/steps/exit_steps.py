"""The steps of `early_exit` with exit layers: a pass in segments between exit layers, and what a token's exit needs.

A pass runs one segment after another until all rows have exited, so layers behind that are neither launched nor read.
The tokens that have exited since all layers last ran, and the current one, form a window. Their states at the exit
layers are kept, and a later token that goes deeper takes them along, so that all K/V are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base_model.unembed import greedy_tokens
from ...depth.early_exit import exit_scores
from ...depth.gates import SegmentRun, active
from ...kernels.reference import exit_mask
from ...weights.upcast import dtype_now
from .step_tensors import StepTensors

WINDOW = 16  # tokens
SEGMENT_WIDTHS = (1, 4, WINDOW)  # of segments; others are padded to the next larger width


class Segment(NamedTuple):
    """A segment of a pass: the layers after the first `begin` up to `end`, over `width` tokens."""

    begin: int
    end: int
    width: int
    criterion: str  # of exits at its end; see `PostHocRun`


class ExitSteps:
    """Steps on the tensors of all steps, and further ones, for the tokens of a window.

    `first` is the index of a segment's first token in the window, `current` that of the token of this pass.
    """

    def __init__(self, tensors: StepTensors, exit_layers: tuple[int, ...]) -> None:
        self.tensors, self.parts, rows, device = tensors, tensors.parts, len(tensors.ids), tensors.device
        self.routers: Any = self.parts.routers
        self.num_layers = self.parts.structure.num_layers
        shape = (rows, WINDOW, self.parts.structure.hidden_size)
        with torch.inference_mode(False):
            empty = torch.zeros(shape, dtype=dtype_now(self.parts.model), device=device)
            self.states = {layer: empty.clone() for layer in exit_layers}  # of the window, by layers executed
            self.exited_state = empty[:, :1].clone()  # of each row's current token, after an exit head
            self.exit_layers = torch.full((rows,), self.num_layers, device=device)  # of each row's current token
            self.exit_threshold = torch.zeros((), device=device)
            self.first, self.current = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))

    def begin(self, exit_threshold: float, current: int) -> None:
        """Begin a pass, for the token at index `current` of the window."""
        self.exit_threshold.fill_(exit_threshold)
        self.exit_layers.fill_(self.num_layers)
        self.current.fill_(current)

    def read(self) -> list[int]:
        """Wait for the last segment; return the exit layer of each row's token, the number of layers if it has none."""
        return self.exit_layers.tolist()

    def segment(self, segment: Segment) -> tuple[int, Tensor | None]:
        """Run a segment, and decide which rows exit at its end; return layers executed, and logits after the last."""
        index = self.first + torch.arange(segment.width, device=self.first.device)
        states = self.states[segment.begin].index_select(1, index) if segment.begin else None
        place = (self.parts.structure, self.tensors.cache, segment.end)
        own = {"finish": self._finish, "execute_layer": self.parts.execute_layer}
        run = SegmentRun(*place, begin=segment.begin, states=states, **own)
        with active(run):
            if segment.end == self.num_layers:
                logits = self._chosen(self._pass(index).logits[:, :1])
                return run.layers_executed, logits
            states = run.states_after(self._pass, index)
        self.states[segment.end].index_copy_(1, index, states)
        state = states.index_select(1, self.current - self.first)
        scores = exit_scores(segment.criterion, self.parts.unembed, self.routers[segment.end], state)[:, 0]
        exits = exit_mask(scores, self.exit_threshold, self.exit_layers == self.num_layers)
        self.exit_layers.copy_(torch.where(exits, segment.end, self.exit_layers))
        return run.layers_executed, None

    def exit_head(self, exit_layer: int) -> tuple[int, None]:
        """Apply the exit head of a layer to the states of the rows that exit there; return layers executed, none."""
        state = self.states[exit_layer].index_select(1, self.current)
        at_layer = (self.exit_layers == exit_layer)[:, None, None]
        self.exited_state.copy_(torch.where(at_layer, self.routers[exit_layer].head(state), self.exited_state))
        return 0, None

    def exit_logits(self, _size: int) -> tuple[int, Tensor]:
        """Map the states of all rows after their exit heads to logits; return layers executed, none, and logits."""
        return 0, self._chosen(self.parts.unembed(self.exited_state))

    def _pass(self, index: Tensor) -> Any:
        """Run the model over the window's tokens at `index`, consecutive ones."""
        tensors, first = self.tensors, index[:1]
        return tensors.forward(tensors.ids.index_select(1, index), tensors.start[0] + first[0], first)

    def _finish(self, states: Tensor) -> Tensor:
        """What the final norm reads, for all tokens: the current one's state after the last layer, or an exit head."""
        state = states.index_select(1, self.current - self.first)
        exited = (self.exit_layers < self.num_layers)[:, None, None]
        return torch.where(exited, self.exited_state, state).expand_as(states)

    def _chosen(self, logits: Tensor) -> Tensor:
        """Put the top-1 tokens of (rows, 1, vocabulary) logits where the host reads them; return the logits."""
        self.tensors.set_results(slice(None), greedy_tokens(logits))
        return logits
