"""TIDE inside `transformers serve`: its server and all its endpoints, one request at a time."""

from __future__ import annotations

from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

from .served_model import ServingOptions, attach


def run_transformers_server(options: ServingOptions, host: str, port: int, **serve_options: Any) -> Serve:
    """Run `transformers serve` with TIDE attached to the model that it loads.

    The server has no setting for how a model is loaded, so its class of models is replaced while it is built. Loading,
    `generate` on a thread of its own, the streamer and cancelling through it all stay its own.

    Args:
        options: The model, and how it decodes. `max_batch` and the limits do not apply.
        host: Where to listen.
        port: Where to listen.
        **serve_options: For transformers' `Serve`.

    Returns:
        The server, once it ends; at once with `non_blocking=True`.
    """

    class Manager(model_manager.ModelManager):
        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return attach(super()._load_model(*args, **kwargs), options, [1])

    own, model_manager.ModelManager = model_manager.ModelManager, Manager
    try:
        settings = {"force_model": options.model, "dtype": options.dtype or "auto", "host": host, "port": port}
        return Serve(**settings, **serve_options)
    finally:
        model_manager.ModelManager = own
