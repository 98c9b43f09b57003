"""Replicas of the served model on the nodes of a Ray cluster, and the backend that shares requests out among them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from .batching import Batcher
from .metrics import Metrics
from .protocol import Accepted, ChatRequest, Delta, Event, Finished, Refused
from .served_model import ServedModel, ServingOptions

logger = logging.getLogger(__name__)
APP = "tide_hf"
LOST = (
    RayActorError,
    NodeDiedError,
    ObjectLostError,
    WorkerCrashedError,
    ReplicaUnavailableError,
    DeploymentUnavailableError,
)
ATTEMPTS = 5  # a request that breaks every replica it meets must not go round for ever
RETRY_SECONDS = 0.2  # times 2 for each further attempt
HEALTH_SECONDS = 5.0


@dataclass(frozen=True)
class ClusterOptions:
    """Where replicas run.

    Attributes:
        replicas: How many.
        ray_address: Of a running cluster (`"auto"`: the one on this node); `None` starts one on this machine alone.
        cpus_per_replica: CPU cores that each reserves, and threads that it uses unless its options name them.
        gpus_per_replica: GPUs that each reserves.
        max_replicas_per_node: `None` is as many as the node's resources allow.
    """

    replicas: int = 1
    ray_address: str | None = None
    cpus_per_replica: float = 1.0
    gpus_per_replica: float = 0.0
    max_replicas_per_node: int | None = None


class Replica:
    """One served model and its batches, in a process of its own."""

    def __init__(self, options: ServingOptions) -> None:
        self.batcher = Batcher(ServedModel.load(options))

    async def stream(self, request: ChatRequest) -> AsyncIterator[Event]:
        """The events of a request."""
        async for event in self.batcher.stream(request):
            yield event

    async def check_health(self) -> None:
        """Asked by Ray Serve, which replaces a replica that raises here."""
        if not await self.batcher.is_healthy():
            raise RuntimeError("one batch after the other fails")

    async def ping(self) -> bool:
        """Whether anyone is there."""
        return True


class RayBackend:
    """Sends each request to a replica, and to another one where that is lost before any of the answer went out.

    Args:
        handle: Of the deployment of `Replica`.
        metrics: Where resubmissions are counted.
    """

    def __init__(self, handle: Any, metrics: Metrics) -> None:
        self.handle = handle
        self.metrics = metrics

    async def stream(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        """The events of a request, as `Batcher.stream` gives them."""
        accepted = streamed = False
        for attempt in range(ATTEMPTS):
            if attempt:
                self.metrics.resubmitted.inc()
                await asyncio.sleep(RETRY_SECONDS * 2**attempt)
            response = self.handle.options(stream=True).stream.remote(request)
            try:
                async for event in _whole_texts(response) if not request.stream else response:
                    if isinstance(event, Accepted) and accepted:
                        continue
                    accepted = True
                    streamed = streamed or isinstance(event, Delta)
                    yield event
                return
            except LOST as error:
                logger.warning("a replica was lost (%s)", type(error).__name__)
                if streamed:
                    message = "The replica that wrote this answer was lost. Send the request again."
                    yield Refused(message, 503, "replica_lost")
                    return
            finally:
                response.cancel()
        yield Refused(f"{ATTEMPTS} replicas were lost while they answered this request.", 503, "replica_lost")

    async def is_healthy(self) -> bool:
        """Whether a replica answers."""
        try:
            return bool(await asyncio.wait_for(_result(self.handle.ping.remote()), HEALTH_SECONDS))
        except (asyncio.TimeoutError, *LOST):
            return False

    async def drain(self, seconds: float) -> None:
        """Leave it to the HTTP server to give answers time: a replica that is deleted finishes nothing."""

    async def close(self) -> None:
        """Stop the replicas. A cluster that was started for them ends with this process."""
        await asyncio.to_thread(serve.delete, APP)


def start_replicas(options: ServingOptions, cluster: ClusterOptions, metrics: Metrics) -> RayBackend:
    """Start replicas, and wait until they have loaded.

    Args:
        options: What each loads.
        cluster: Where they run.
        metrics: For the backend.
    """
    if cluster.ray_address is not None:
        ray.init(address=cluster.ray_address, namespace=APP)
    else:
        ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", namespace=APP)
    serve.start(proxy_location="Disabled")
    settings: dict[str, Any] = {
        "num_replicas": cluster.replicas,
        "ray_actor_options": {"num_cpus": cluster.cpus_per_replica, "num_gpus": cluster.gpus_per_replica},
        "max_ongoing_requests": 2 * options.max_batch,  # one batch that decodes, one that gathers
        "health_check_period_s": HEALTH_SECONDS,
    }
    if cluster.max_replicas_per_node is not None:
        settings["max_replicas_per_node"] = cluster.max_replicas_per_node
    deployment = serve.deployment(**settings)(Replica)
    handle = serve.run(deployment.bind(options), name=APP, route_prefix=None)
    return RayBackend(handle, metrics)


async def _whole_texts(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Hold text back until the answer is complete, so that one which is not streamed can start over at any time."""
    texts = []
    async for event in events:
        if isinstance(event, Delta):
            texts.append(event.text)
            continue
        if isinstance(event, Finished):
            yield Delta("".join(texts))
        yield event


async def _result(response: Any) -> Any:
    return await response
