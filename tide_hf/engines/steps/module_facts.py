"""What a graph of a module takes for given: the hooks on it, and plain attributes such as a scale."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

_KINDS = (bool, float, str)  # no whole numbers, which may count calls, nor what is set when it is first needed


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The hooks that a call of the module runs, those on all modules of the process included, by identity."""
    own, common = (module._forward_hooks, module._forward_pre_hooks), (_global_forward_hooks, _global_forward_pre_hooks)
    return tuple(id(hook) for hooks in (*own, *common) for hook in hooks.values())


def settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes of a module, lists of them among these; PEFT says by them which adapters are active."""
    found: list[tuple[str, Any]] = []
    for name, value in module.__dict__.items():
        if isinstance(value, _KINDS):
            found.append((name, value))
        elif isinstance(value, list) and all(isinstance(part, _KINDS) for part in value):
            found.append((name, tuple(value)))
    return tuple(found)
