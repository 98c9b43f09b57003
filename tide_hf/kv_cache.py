"""The key-value cache under early exit: fill what skipped layers would have written, and roll back."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from .errors import UnsupportedOptionError, describe


class _Stored(BaseException):
    """Raised by a storing view once the K/V are in the cache."""


class _StoreAndStop:
    """Mixin for a view of a cache whose `update` stores and then leaves the layer."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        super().update(*args, **kwargs)  # type: ignore[misc]
        raise _Stored


@cache
def _view_class(cache_class: Any) -> Any:
    return type(cache_class.__name__, (_StoreAndStop, cache_class), {})


def storing_view(cache: Cache) -> Cache:
    """A view of `cache` that shares its contents; it is an instance of the same class."""
    view_class = _view_class(type(cache))  # type: ignore[arg-type]
    view = object.__new__(view_class)
    view.__dict__ = cache.__dict__
    return view


def fill_skipped(native_forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write the K/V that a skipped layer would write for its input, by its own code (`propagate`).

    Only what precedes the cache update runs: the layer's norm and its q, k and v.

    Args:
        native_forward: The layer's own forward.
        args: Its positional arguments; the cache may be among them (gpt2).
        kwargs: Its keyword arguments.
    """
    args = tuple(storing_view(value) if isinstance(value, Cache) else value for value in args)
    kwargs = {name: storing_view(value) if isinstance(value, Cache) else value for name, value in kwargs.items()}
    try:
        native_forward(*args, **kwargs)
    except _Stored:
        return
    raise AssertionError("a decoder layer ran to its end without updating its cache")  # a bug of ours, not of a user


def find_cache(model_kwargs: dict[str, Any], mode: str) -> Cache:
    """Return the call's cache, or say why `mode` cannot run with it.

    Args:
        model_kwargs: Keyword arguments that `generate` prepared.
        mode: The mode, for the message.

    Raises:
        UnsupportedOptionError: There is no cache, or one of a fixed size.
    """
    cache = model_kwargs.get("past_key_values") if model_kwargs.get("use_cache", True) else None
    if not isinstance(cache, Cache) or cache.is_compileable or type(cache).__name__ == "QuantizedCache":
        raise UnsupportedOptionError(
            describe(
                f"tide_mode={mode!r} cannot use this cache",
                got=type(cache).__name__ if cache is not None else "no cache (use_cache=False)",
                expected="a DynamicCache, which is the default of generate()",
                do="Leave cache_implementation and use_cache at their defaults, or detach TIDE for this call.",
            )
        )
    return cache
