"""``tide-hf serve``: transformers' own server, with TIDE attached to the model that it loads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import typer
from transformers import GenerationConfig
from transformers.utils.import_utils import is_serve_available

from ..common.choices import is_count
from ..common.errors import ConfigurationError, MissingPackageError, short
from ..model import TIDEModelForCausalLM
from ..routers.eagle3 import ForeignHead
from ..routers.routers import TIDERouters
from .model_arguments import modes_to_run, named_routers, routers_for

# What a client may set in `generation_config`; the rest would choose the mode or engine, multiply the work, or ask for
# output that the server does not send.
CLIENT_OPTIONS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("max_new_tokens", "min_new_tokens", "max_time", "stop_strings", "bos_token_id", "eos_token_id", "pad_token_id"),
    "transformers_version",
)
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # names of `max_new_tokens` outside of it
USUAL_NEW_TOKENS = 1024  # of answers that neither client nor model limits, as in transformers' server
MOST_STOP_CHARACTERS = 256  # in all stop strings together, which transformers takes a second to prepare


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
    with prepared_models(partial(attach_warmed_up, args=args, named=named)), bounded_requests(args.max_new_tokens):
        server([args.model, "--dtype", args.dtype or "auto", *args.passed_on], prog_name="tide-hf serve")


@contextmanager
def prepared_models(prepare: Callable[[Any], Any]) -> Iterator[None]:
    """Apply `prepare` to each model that transformers' server loads inside this context.

    The server has no hook for this, so its model-loading method is replaced. The server loads the model
    named on its command line before it listens.
    """
    from transformers.cli.serving.model_manager import ModelManager  # noqa: PLC0415 - needs packages of the extra

    with _replaced(ModelManager, "_load_model", lambda load: lambda *args, **kwargs: prepare(load(*args, **kwargs))):
        yield


@contextmanager
def bounded_requests(max_new_tokens: int) -> Iterator[None]:
    """Have transformers' server answer what [`bounded_config`] refuses with status 400, inside this context."""
    from fastapi import HTTPException  # noqa: PLC0415 - these are packages of the extra
    from transformers.cli.serving.chat_completion import ChatCompletionHandler  # noqa: PLC0415
    from transformers.cli.serving.completion import CompletionHandler  # noqa: PLC0415
    from transformers.cli.serving.response import ResponseHandler  # noqa: PLC0415

    def bounded(build: Callable[..., Any]) -> Callable[..., Any]:
        def build_bounded(handler: Any, body: dict[str, Any], own: Any, **kwargs: Any) -> Any:
            try:
                return bounded_config(partial(build, handler, body, own, **kwargs), body, own, max_new_tokens)
            except (ValueError, TypeError, OverflowError) as error:  # or transformers refuses a value
                raise HTTPException(status_code=400, detail=str(error)) from error

        return build_bounded

    with ExitStack() as stack:
        for handler in (ChatCompletionHandler, CompletionHandler, ResponseHandler):
            stack.enter_context(_replaced(handler, "_build_generation_config", bounded))
        yield


def bounded_config(build: Callable[[], Any], body: dict[str, Any], own: Any, max_new_tokens: int) -> Any:
    """The generation config that `build` makes of a request's `body`, or of the model's `own`, within the bounds.

    Raises [`ConfigurationError`] if the request sets other than `CLIENT_OPTIONS`, or asks for more than is allowed.
    """
    given: dict[str, Any] = dict(json.loads(body.get("generation_config") or "{}"))
    usual: dict[str, Any] = getattr(GenerationConfig, "_get_default_generation_params", dict)()
    others = [
        f"{name}={short(value)}"
        for name, value in given.items()
        if name not in CLIENT_OPTIONS and value not in (None, usual.get(name), getattr(own, name, None))
    ]
    if others:
        expected, do = "only " + ", ".join(CLIENT_OPTIONS), "Leave the others out of generation_config."
        raise _refused("clients of this server may not set an option", ", ".join(others), expected, do)
    asked = [given.get("max_new_tokens"), *(body.get(name) for name in LIMITS)]
    config = build()
    if any(number is not None and not (is_count(number) and number <= max_new_tokens) for number in asked):
        numbers = ", ".join(short(number) for number in asked if number is not None)
        expected, do = f"at most {max_new_tokens}", "Ask for fewer; the server's --max-new-tokens sets the limit."
        raise _refused("the answer may become too long", f"{numbers} tokens", expected, do)
    config.max_new_tokens = min(config.max_new_tokens or USUAL_NEW_TOKENS, max_new_tokens)
    stops = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or []
    length = sum(map(len, stops))
    if length > MOST_STOP_CHARACTERS:
        expected = f"at most {MOST_STOP_CHARACTERS} together"
        raise _refused("the stop strings are too long", f"{length} characters", expected, "Shorten them.")
    return config


def _refused(problem: str, got: str, expected: str, do: str) -> ConfigurationError:
    return ConfigurationError(problem, got=got, expected=expected, do=do)


@contextmanager
def _replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method of a class by what `change` makes of it, inside this context."""
    own = getattr(owner, name)
    setattr(owner, name, change(own))
    try:
        yield
    finally:
        setattr(owner, name, own)


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
        compute_dtype=args.compute_dtype,
        remembered_tokens=args.remembered_tokens,
    )
    if attached._tide.runs_on_steps:
        attached.tide_warm_up()
    return attached
