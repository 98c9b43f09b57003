"""Forward hooks that read the outputs of decoder layers. `depth.gates` replaces `forward` instead, to skip layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from .structure import DecoderStructure


def hook_layers(structure: DecoderStructure, exit_layers: Iterable[int], call: Callable[[int, Any], None]) -> ExitStack:
    """Call `call(exit_layer, output)` each time layer number `exit_layer` has run; close the returned stack to stop."""
    hooks = ExitStack()
    for exit_layer in exit_layers:
        layer = structure.layers[exit_layer - 1]
        handle = layer.register_forward_hook(lambda _module, _args, output, number=exit_layer: call(number, output))
        hooks.enter_context(handle)
    return hooks
