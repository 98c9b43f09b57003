"""Full-depth passes that also collect the hidden states after a few layers, which a draft head reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .gates import LayerGate, LayerRun, input_state


class TapRun(LayerRun):
    """A run of full-depth passes that collects the states after `tap_layers` layers each, ascending.

    Attributes:
        tapped: (rows, width, taps * D) of the last pass.
    """

    def __init__(self, *args: Any, tap_layers: Sequence[int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tap_layers = list(tap_layers)
        self.tapped: Tensor | None = None
        self._states: dict[int, Tensor] = {}  # of the current pass, by number of layers

    def starts(self, kwargs: dict[str, Any]) -> None:
        """Forget the states of the last pass."""
        self._states, self.tapped = {}, None

    def run_layer(self, gate: LayerGate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the layer; collect the hidden states at the tap layers."""
        if gate.layer_idx == 0 and 0 in self.tap_layers:
            self._states[0] = input_state(args, kwargs)
        output = self.execute(gate, args, kwargs)
        depth = gate.layer_idx + 1
        if depth in self.tap_layers and depth not in self._states:
            self._states[depth] = gate.state_of(output)
        if depth == self.num_layers:
            self.end_pass()
        return output

    def joined_layers(self, layer_idx: int) -> int:
        """All, since what runs them gives the states between them as well."""
        return self.num_layers

    def taps_in(self, begin: int, end: int) -> list[int]:
        """See `LayerRun.taps_in`."""
        return [depth for depth in self.tap_layers if begin < depth <= end]

    def take_tapped(self, depths: list[int], tapped: Tensor) -> None:
        """See `LayerRun.take_tapped`."""
        self._states |= dict(zip(depths, tapped.unbind(2), strict=True))
        if depths == self.tap_layers:
            self.tapped = tapped.flatten(2)

    def end_pass(self) -> None:
        """Called after the last layer of each pass."""
        if self.tapped is None:
            states = [self._states[depth] for depth in self.tap_layers]
            self.tapped = torch.cat([state.to(states[-1].device) for state in states], dim=-1)
        self._states = {}
