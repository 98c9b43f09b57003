"""Options of `generate` put into words that are the same in every process, so that work can go on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig

from .errors import UnsupportedOptionError, describe, short
from .unembed import weights_hash

DEEPEST = 9  # objects within objects


def recognisable(name: str, value: Any) -> Any:
    """Describe an option of `generate_dataset` for JSON.

    Args:
        name: Its name.
        value: A value, a function or class at the top of a module, or an object whose attributes are such.

    Returns:
        Texts, lists and mappings; of tensors the values, of modules a hash of the weights.

    Raises:
        UnsupportedOptionError: The description would say where it is in memory, and so nothing to another process.
    """
    described = _described(value)
    if " at 0x" in str(described):
        raise UnsupportedOptionError(
            describe(
                "generate_dataset() could not tell when it goes on whether an option is the same",
                got=f"{name}={short(value)}",
                expected="a value, a function at the top of a module, or an object with attributes that are such",
                do="Write the function or class at the top of a module, and keep in its attributes only what it is "
                "made with.",
            )
        )
    return described


def _described(value: Any, depth: int = 0) -> Any:
    """A value for JSON, the same in every process: an object is its class and attributes."""
    if isinstance(value, GenerationConfig):
        value = value.to_diff_dict()
        value = {name: value[name] for name in value if name[0] != "_" and name != "transformers_version"}
    if depth < DEEPEST and not isinstance(value, (Tensor, nn.Module, type, FunctionType)):
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, Mapping):
            return {str(name): _described(one, depth + 1) for name, one in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return [_described(one, depth + 1) for one in ordered]
        if attributes or (attributes is not None and type(value).__repr__ is object.__repr__):
            return {_name(type(value)): _described(attributes, depth + 1)}
    return _in_words(value)


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"  # on any device
    if isinstance(value, nn.Module):
        return f"{_name(type(value))} {weights_hash(value)}"
    if isinstance(value, (type, FunctionType)) and "<" not in value.__qualname__:  # lambdas have one name
        return _name(value)
    return repr(value)


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
