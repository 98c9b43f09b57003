"""Decoding with token-informed depth for a model that was loaded without it: `generate(custom_generate="org/tide")`."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from tide_hf import TIDEModelForCausalLM, TIDERouters

# Arguments of generate() that tell where this file comes from; the first is about its repository alone.
HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")

_routers_of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def generate(model: Any, routers: Any = None, **kwargs: Any) -> Any:
    """Attach TIDE to `model`, where that has not been done, and generate.

    Args:
        model: The model that `generate` was called on. TIDE stays attached to it, so that its measured costs are of
            use to the next call; `TIDEModelForCausalLM.detach(model)` takes it off.
        routers: Routers made for the model: a Hub repository, a folder or `TIDERouters`. Without them drafts come
            from n-grams of the context alone.
        **kwargs: All other arguments of `generate`, the streamer and TIDE's own (`tide_mode`, `exit_threshold`)
            among them.

    Returns:
        What `model.generate` returns.
    """
    hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
    hub.pop("revision", None)
    attached = isinstance(model, TIDEModelForCausalLM)
    if not attached or (routers is not None and _routers_of.get(model) != routers):
        is_name = routers is not None and not isinstance(routers, TIDERouters)
        loaded = TIDERouters.from_pretrained(routers, **hub) if is_name else routers
        TIDEModelForCausalLM.attach(model, loaded)
        _routers_of[model] = routers
    return model.generate(**kwargs)
