"""What a graph of a module depends on: its hooks, and plain attributes such as a scale."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

_KINDS = (bool, float, str)  # not int, which may count calls, and not objects, which may be set lazily


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """Ids of the hooks that a call of the module runs, including the process's global hooks."""
    own, common = (module._forward_hooks, module._forward_pre_hooks), (_global_forward_hooks, _global_forward_pre_hooks)
    return tuple(id(hook) for hooks in (*own, *common) for hook in hooks.values())


def settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes of a module, including lists of them, such as PEFT's list of active adapters."""
    found: list[tuple[str, Any]] = []
    for name, value in module.__dict__.items():
        if isinstance(value, _KINDS):
            found.append((name, value))
        elif isinstance(value, list) and all(isinstance(part, _KINDS) for part in value):
            found.append((name, tuple(value)))
    return tuple(found)
