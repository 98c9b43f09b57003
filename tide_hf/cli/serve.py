"""``tide-hf serve``: transformers' own server, with TIDE attached to the model that it loads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import typer
from transformers.utils.import_utils import is_serve_available

from ..common.errors import ConfigurationError, MissingPackageError
from ..model import TIDEModelForCausalLM
from ..routers.eagle3 import ForeignHead
from ..routers.routers import TIDERouters
from .model_arguments import modes_to_run, named_routers, routers_for


def run(args: argparse.Namespace) -> None:
    """Run the command; `args.passed_on` holds the options for `transformers serve`, which `parser` does not know."""
    if not is_serve_available():
        raise MissingPackageError(
            "the server cannot start",
            got="an environment without fastapi, uvicorn, pydantic or openai",
            expected="the packages of the extra 'serve'",
            do='Run: pip install "tide-hf[serve]"',
        )
    if "--continuous-batching" in args.passed_on:
        raise ConfigurationError(
            "TIDE does not support continuous batching",
            got="--continuous-batching",
            expected="a server that answers one request at a time",
            do="Leave it out, or run `transformers serve` without TIDE.",
        )
    named = named_routers(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    from transformers.cli.serve import Serve  # noqa: PLC0415 - needs packages of the extra

    server = typer.Typer(add_completion=False)
    server.command()(Serve)
    with prepared_models(partial(attach_warmed_up, args=args, named=named)):
        server([args.model, "--dtype", args.dtype or "auto", *args.passed_on], prog_name="tide-hf serve")


@contextmanager
def prepared_models(prepare: Callable[[Any], Any]) -> Iterator[None]:
    """Apply `prepare` to each model that transformers' server loads inside this context.

    The server has no hook for this, so its model-loading method is replaced. The server loads the model
    named on its command line before it listens.
    """
    from transformers.cli.serving.model_manager import ModelManager  # noqa: PLC0415 - needs packages of the extra

    load = ModelManager._load_model
    ModelManager._load_model = lambda *args, **kwargs: prepare(load(*args, **kwargs))
    try:
        yield
    finally:
        ModelManager._load_model = load


def attach_warmed_up(model: Any, args: argparse.Namespace, named: TIDERouters | ForeignHead | None) -> Any:
    """Attach TIDE with the command's arguments, and warm up the engine, so that no request waits for the warm-up."""
    routers, _ = routers_for(model, args, named)
    modes_to_run(args.mode, routers)
    attached = TIDEModelForCausalLM.attach(
        model,
        routers,
        mode=args.mode,
        exit_threshold=args.exit_threshold,
        engine=args.engine,
        remembered_tokens=args.remembered_tokens,
    )
    if attached._tide.runs_on_steps:
        attached.tide_warm_up()
    return attached
