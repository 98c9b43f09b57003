"""``tide-hf serve``: an OpenAI-compatible chat server."""

from __future__ import annotations

import argparse
import os
import socket
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import ConfigurationError, MissingPackageError, describe
from . import KEY_VARIABLE

if TYPE_CHECKING:
    from ..serving.limits import Limits
    from ..serving.served_model import ServingOptions

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
MAX_CONNECTIONS_BESIDE = 200  # open connections beside those of requests that are answered


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    uses_ray = args.replicas is not None or args.ray_address is not None
    _check_packages(["starlette", "uvicorn", "prometheus_client"] + ["ray", "grpc"] * uses_ray)  # Ray Serve needs grpc
    from ..serving.served_model import ServingOptions  # noqa: PLC0415 - needs packages of the extra

    options = ServingOptions(
        model=args.model,
        routers=args.routers,
        mode=args.mode,
        exit_threshold=args.exit_threshold,
        engine=args.engine,
        dtype=args.dtype,
        threads=args.threads,
        max_batch=args.max_batch,
        max_prompt_tokens=args.max_prompt_tokens,
        max_tokens=args.max_tokens,
        keep=args.keep,
    )
    if args.server == "transformers":
        _serve_with_transformers(args, options, uses_ray)
        return
    _run(args, options, limits_of(args), uses_ray)


def limits_of(args: argparse.Namespace) -> Limits:
    """The limits that the arguments name.

    Raises:
        ConfigurationError: Other machines could use the server, and there is no key.
    """
    from ..serving.limits import Limits, is_loopback  # noqa: PLC0415

    api_key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    local = is_loopback(args.host)
    if not local and api_key is None:
        raise ConfigurationError(
            describe(
                "a server that others can reach needs an API key",
                got=f"--host {args.host} without one",
                expected=f"a key in ${KEY_VARIABLE} or --api-key, or --host 127.0.0.1",
                do=f"Set {KEY_VARIABLE} to a long random text.",
            )
        )
    return Limits(
        api_key=api_key,
        hosts=(*dict.fromkeys((*LOCAL_NAMES, args.host)),) if local and api_key is None else None,
        max_body_bytes=args.max_body_bytes,
        max_requests=args.max_queue,
        requests_per_minute=args.rate,
    )


def listener(host: str, port: int) -> socket.socket:
    """A socket at this address, taken before the model is loaded: whoever cannot have it is told at once.

    Raises:
        ConfigurationError: Another program has it, or this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
        taken.listen()  # else another program could still take it while the model is loaded
    except (OSError, UnicodeError) as error:
        taken.close()
        raise ConfigurationError(
            describe(
                "the server cannot listen there",
                got=f"'{error}' for {host} port {port}",
                expected="an address of this machine with a port that no other program has",
                do="Name another --port or --host, or stop the other program.",
            )
        ) from error
    return taken


def _run(args: argparse.Namespace, options: ServingOptions, limits: Limits, uses_ray: bool) -> None:
    import uvicorn  # noqa: PLC0415

    from ..serving.app import create_app  # noqa: PLC0415
    from ..serving.http_server import HTTPServer  # noqa: PLC0415
    from ..serving.metrics import Metrics  # noqa: PLC0415

    metrics, name, taken = Metrics(), model_name(args), listener(args.host, args.port)
    backend = _ray_backend(args, options, metrics) if uses_ray else _local_backend(options)
    app = create_app(backend, name, limits, metrics)
    host = f"[{args.host}]" if ":" in args.host else args.host
    Console(stderr=True).print(f"Serving {name} at http://{host}:{args.port}/v1", highlight=False, soft_wrap=True)
    # h11 bounds what it reads of headers; proxies' words about who a client is are not taken.
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.max_requests + MAX_CONNECTIONS_BESIDE,
        log_level="warning",
        timeout_graceful_shutdown=10,
    )
    with suppress(KeyboardInterrupt), taken:  # by which servers are stopped
        HTTPServer(config, backend).run(sockets=[taken])


def _local_backend(options: ServingOptions) -> Any:
    from ..serving.batching import Batcher  # noqa: PLC0415
    from ..serving.served_model import ServedModel  # noqa: PLC0415

    return Batcher(ServedModel.load(options))


def _ray_backend(args: argparse.Namespace, options: ServingOptions, metrics: Any) -> Any:
    from ..serving.deployment import ClusterOptions, start_replicas  # noqa: PLC0415

    names = ("ray_address", "cpus_per_replica", "gpus_per_replica", "max_replicas_per_node")
    cluster = ClusterOptions(replicas=args.replicas or 1, **{name: getattr(args, name) for name in names})
    return start_replicas(options, cluster, metrics)


def _serve_with_transformers(args: argparse.Namespace, options: ServingOptions, uses_ray: bool) -> None:
    limits = limits_of(args)
    if limits.api_key is not None or limits.hosts is None or uses_ray:
        raise ConfigurationError(
            describe(
                "the server of transformers can do neither API keys nor replicas",
                got="--server transformers with one of them",
                expected="one process on this machine alone",
                do="Leave them out, or use --server batches.",
            )
        )
    _check_packages(["fastapi", "openai"])
    from ..serving.transformers_server import run_transformers_server  # noqa: PLC0415

    run_transformers_server(options, args.host, args.port)


def model_name(args: argparse.Namespace) -> str:
    """The name by which clients know the model: no path of this machine."""
    return str(args.model_name or (Path(args.model).resolve().name if Path(args.model).is_dir() else args.model))


def _check_packages(names: list[str]) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            describe(
                "the server cannot start",
                got=f"an environment without {', '.join(missing)}",
                expected="the packages of the extra 'serve'",
                do='Run: pip install "tide-hf[serve]"',
            )
        )
