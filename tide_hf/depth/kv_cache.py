"""The KV cache under early exit: fill the K/V of skipped layers, and roll back rejected tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from packaging import version
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    QuantizedCache,
    StaticLayer,
)

from ..base_model.structure import CACHE
from ..common.errors import UnsupportedOptionError, describe


class _Stored(BaseException):
    """Raised by a storing view once the K/V are written."""


class _StoreAndStop:
    """Mixin for a view of a cache whose `update` stores the K/V and ends the layer's forward."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        super().update(*args, **kwargs)  # type: ignore[misc]
        raise _Stored


@cache
def _view_class(cache_class: Any) -> Any:
    return type(cache_class.__name__, (_StoreAndStop, cache_class), {})


def storing_view(cache: Cache) -> Cache:
    """A view of `cache` that shares its contents, and passes `isinstance` checks for its class."""
    view_class = _view_class(type(cache))  # type: ignore[arg-type]
    view = object.__new__(view_class)
    view.__dict__ = cache.__dict__
    return view


def fill_skipped(gate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fill a skipped layer's K/V from its input, by the layer's own code (`propagate`).

    Only the code before the cache update runs: the input norm and the q, k and v projections.

    Args:
        gate: The layer's gate.
        args: Its positional arguments; the cache may be among them (gpt2).
        kwargs: Its keyword arguments.
    """
    args = tuple(storing_view(value) if isinstance(value, Cache) else value for value in args)
    kwargs = {name: storing_view(value) if isinstance(value, Cache) else value for name, value in kwargs.items()}
    try:
        gate.native(*args, **kwargs)
    except _Stored:
        return
    raise AssertionError("a decoder layer ran to its end without updating its cache")  # a bug in tide_hf


def fill_zeros(gate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fill a skipped layer's K/V with zeros (`zero_pad`, the name in the TIDE paper)."""
    cache = next(value for value in (*args, *kwargs.values()) if isinstance(value, Cache))
    layer = cache.layers[gate.layer_idx]
    cache.update(torch.zeros_like(layer.keys[:, :, :1]), torch.zeros_like(layer.values[:, :, :1]), gate.layer_idx)


def fill_for(strategy: str, config: Any) -> Callable[..., None]:
    """Choose the function that fills a skipped layer's K/V, given its gate and arguments.

    Args:
        strategy: The routers' `kv_cache_strategy`: `propagate` or `zero_pad`.
        config: The base model's text config.

    Raises:
        UnsupportedOptionError: Some layers share the K/V of others, as Gemma 4's do.
    """
    num_shared = getattr(config, "num_kv_shared_layers", 0)
    if num_shared:
        raise UnsupportedOptionError(
            describe(
                "K/V that layers share cannot be filled for a skipped layer",
                got=f"kv_cache_strategy={strategy!r}, and {num_shared} layers without K/V of their own",
                expected="kv_cache_strategy='recompute' for this model",
                do="Set routers.config.kv_cache_strategy = 'recompute'.",
            )
        )
    return fill_skipped if strategy == "propagate" else fill_zeros


def cache_is_returned(generation_config: Any, cache: Any) -> bool:
    """Whether the caller of `generate` gets the cache back."""
    return bool(generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))


def find_cache(model_kwargs: dict[str, Any], user: str, static: str, moves_rows: bool = False) -> Cache:
    """Return the call's cache, or raise if it cannot be used.

    Args:
        model_kwargs: Keyword arguments that `generate` prepared.
        user: Name of the feature that uses it, for the message.
        static: Which static caches are supported: `"any"`, `"full"` (without sliding windows) or `"none"`.
        moves_rows: Whether `user` compacts the rows of a batch.

    Raises:
        UnsupportedOptionError: There is no cache, or one that cannot be rolled back.
    """
    cache: Any = model_kwargs.get(CACHE) if model_kwargs.get("use_cache", True) else None
    got = type(cache).__name__ if cache is not None else "no cache (use_cache=False)"
    has_encoder = model_kwargs.get("encoder_hidden_states") is not None
    got += " beside an encoder's" if has_encoder else ""
    supported = isinstance(cache, Cache) and not isinstance(cache, QuantizedCache | EncoderDecoderCache)
    supported = supported and not has_encoder
    if supported and static != "any" and any(isinstance(layer, StaticLayer) for layer in cache.layers):
        got += " with sliding-window layers" if any(cache.is_sliding) else ""
        supported = static == "full" and not any(cache.is_sliding)
    if supported and static != "any" and any(getattr(layer, "record_past", False) for layer in cache.layers):
        got += " that records the past"  # the first rollback would discard the record
        supported = False
    if supported and moves_rows and (others := [one for one in cache.layers if not _is_movable(one)]):
        got += f" with a {type(others[0]).__name__}"
        supported = False
    if not supported:
        also = {"any": ", or a StaticCache", "full": ", or a StaticCache without sliding windows", "none": ""}[static]
        raise UnsupportedOptionError(
            describe(
                f"{user} cannot use this cache",
                got=got,
                expected=f"a DynamicCache, which is the default of generate(){also}",
                do="Leave cache_implementation and use_cache at their defaults, call activate_past_recording() "
                "afterwards, or detach TIDE for this call.",
            )
        )
    return cache


def _is_movable(layer: Any) -> bool:
    """Whether a cache layer holds nothing but K/V, so that its rows can be moved."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, SLIDING_LAYER)


def last_slot(cache: Cache) -> int | None:
    """Number of slots of a static cache; `None` for a dynamic one."""
    return min((layer.get_max_length() for layer in cache.layers if isinstance(layer, StaticLayer)), default=None)


def crop(layer: Any, num_tokens: int) -> None:
    """Remove the last `num_tokens` tokens from one layer of a cache.

    Called with 0 it still lets a sliding-window layer drop what has left the window.
    """
    if isinstance(layer, StaticLayer) and not hasattr(layer, "crop"):  # as in transformers 5.17 and 5.18
        for name, length in vars(layer).items():
            if name.endswith("cumulative_length"):  # an attention index has a counter of its own
                length.sub_(num_tokens)  # in place; the next pass overwrites the rejected slots
    elif getattr(layer, "is_initialized", True):  # layers that attend to images stay empty without images
        layer.crop(-num_tokens)


class _VisibleSlidingLayer(DynamicSlidingWindowLayer):
    """Returns as many tokens as masks cover, for any number of passes since the last crop.

    transformers' own layer does so from 5.18 on.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `DynamicSlidingWindowLayer.update`, without the tokens outside the window."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]


SLIDING_LAYER = (
    DynamicSlidingWindowLayer
    if version.parse(transformers.__version__) >= version.parse("5.18")
    else _VisibleSlidingLayer
)


def start_recording(cache: Cache) -> None:
    """Make a cache keep tokens that leave its sliding window until it is cropped, so that it can be rolled back."""
    cache.activate_past_recording()
    if SLIDING_LAYER is DynamicSlidingWindowLayer:
        return
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.__class__ = SLIDING_LAYER


def stop_recording(cache: Cache) -> None:
    """Restore the usual sliding-window behaviour of a cache that is returned."""
    for layer in cache.layers:
        if type(layer) is SLIDING_LAYER:
            layer.__class__ = DynamicSlidingWindowLayer
        if getattr(layer, "record_past", False):
            crop(layer, 0)
            layer.record_past = False


def cut_back(cache: Cache, length: int) -> None:
    """Crop all layers to the first `length` tokens, after an interrupted pass wrote to some of them."""
    for layer in cache.layers:
        crop(layer, int(layer.get_seq_length()) - length)
    stop_recording(cache)
