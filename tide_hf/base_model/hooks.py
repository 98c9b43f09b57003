"""Forward hooks on decoder layers. Nothing else in this library registers one; `depth.gates` replaces forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

from .structure import DecoderStructure


def hook_layer(structure: DecoderStructure, exit_layer: int, keep: Callable[[int, Any], None]) -> RemovableHandle:
    """Call `keep(exit_layer, output)` whenever that layer has run, until the handle is removed.

    Args:
        structure: The base model's structure.
        exit_layer: Number of layers executed, 1 ... L.
        keep: Takes that number and what the layer returns.
    """
    layer = structure.layers[exit_layer - 1]
    return layer.register_forward_hook(lambda _module, _args, output: keep(exit_layer, output))


@contextmanager
def hooked_layers(
    structure: DecoderStructure, exit_layers: Iterable[int], keep: Callable[[int, Any], None]
) -> Iterator[None]:
    """As [`hook_layer`] for several layers; the hooks are always removed."""
    with ExitStack() as handles:
        for exit_layer in exit_layers:
            handles.enter_context(hook_layer(structure, exit_layer, keep))
        yield
