"""The HTTP side: chat completions whole or streamed, the list of models, health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import RequestError, describe
from .limits import Guard, Limits, error_response, read_body
from .metrics import Metrics
from .protocol import (
    Accepted,
    AnswerShape,
    ChatRequest,
    Delta,
    Event,
    Finished,
    Refused,
    error_body,
    server_sent_event,
)
from .requests import parse_chat_request

STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Backend(Protocol):
    """What answers requests: a `Batcher` in this process, or `deployment.RayBackend`."""

    def stream(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        """The events of a request; closing them cancels it."""

    async def is_healthy(self) -> bool:
        """Whether requests can be answered."""

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and give those that are being answered some time."""

    async def close(self) -> None:
        """Give everything back."""


def create_app(backend: Backend, model_id: str, limits: Limits, metrics: Metrics | None = None) -> Guard:
    """Build the server.

    Args:
        backend: What answers.
        model_id: The name by which clients know the model.
        limits: What is refused.
        metrics: Where it counts; default: counts of its own.

    Returns:
        An ASGI app.
    """
    metrics = Metrics() if metrics is None else metrics
    routes = _Routes(backend, model_id, limits, metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await backend.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics_text),
        ],
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_error, 500: _on_failure},
        lifespan=lifespan,
    )
    return Guard(app, limits, metrics)


class _Routes:
    def __init__(self, backend: Backend, model_id: str, limits: Limits, metrics: Metrics) -> None:
        self.backend = backend
        self.model_id = model_id
        self.card = {"id": model_id, "object": "model", "created": 0, "owned_by": "tide_hf"}
        self.limits = limits
        self.metrics = metrics
        self.open_requests = 0

    async def chat(self, request: Request) -> Answer:
        body = await read_body(request, self.limits)
        return Answer(self, parse_chat_request(body, self.model_id))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.card]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.model_id:
            raise HTTPException(404)
        return JSONResponse(self.card)

    async def health(self, request: Request) -> Response:
        healthy = await self.backend.is_healthy()
        return JSONResponse({"status": "ok" if healthy else "failing"}, status_code=200 if healthy else 503)

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


class Answer(Response):
    """The response to one chat request. A client that leaves, or stops reading, cancels it.

    Args:
        routes: The server's state.
        request: The request.
    """

    def __init__(self, routes: _Routes, request: ChatRequest) -> None:
        self.routes = routes
        self.request = request
        self.shape = AnswerShape(routes.model_id)
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, unless there are too many to answer already."""
        routes = self.routes
        if routes.open_requests >= routes.limits.max_requests:
            raise RequestError(
                describe(
                    "the server is busy",
                    got="one more request",
                    expected=f"at most {routes.limits.max_requests} at a time",
                    do="Try again later.",
                ),
                status=503,
                code="overloaded",
            )
        routes.open_requests += 1
        routes.metrics.requests.set(routes.open_requests)

        async def send_in_time(message: Any) -> None:
            try:
                await asyncio.wait_for(send(message), routes.limits.client_seconds)
            except asyncio.TimeoutError as error:
                raise ClientDisconnect from error

        answering = asyncio.create_task(self._answer(scope, receive, send_in_time))
        leaving = asyncio.create_task(_client_leaves(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and not isinstance(answering.exception(), ClientDisconnect):
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait({answering, leaving})
            routes.open_requests -= 1
            routes.metrics.requests.set(routes.open_requests)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self.routes.backend.stream(self.request)) as events:
            first = await anext(events)
            if isinstance(first, Refused):
                raise _as_error(first)
            assert isinstance(first, Accepted)
            self.routes.metrics.prompt_tokens.inc(first.prompt_tokens)
            if not self.request.stream:
                response: Response = JSONResponse(await self._whole(events, first))
                await response(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            async for data in self._chunks(events, first):
                await send({"type": "http.response.body", "body": server_sent_event(data), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, events: AsyncIterator[Event], first: Accepted) -> dict[str, Any]:
        texts = []
        async for event in events:
            if isinstance(event, Refused):
                raise _as_error(event)
            if isinstance(event, Delta):
                texts.append(event.text)
            if isinstance(event, Finished):
                self.routes.metrics.finish(event)
                return self.shape.whole("".join(texts), first.prompt_tokens, event)
        raise _cut_off()

    async def _chunks(self, events: AsyncIterator[Event], first: Accepted) -> AsyncIterator[dict[str, Any] | str]:
        yield self.shape.first_chunk()
        async for event in events:
            if isinstance(event, Delta):
                yield self.shape.chunk(event.text)
            elif isinstance(event, Refused):  # too late for a status; clients of OpenAI know an error among the chunks
                yield error_body(event.message, event.status, event.code, event.param)
            elif isinstance(event, Finished):
                self.routes.metrics.finish(event)
                yield self.shape.last_chunk(event.reason)
                if self.request.include_usage:
                    yield self.shape.usage_chunk(first.prompt_tokens, event.completion_tokens)
                yield "[DONE]"


async def _client_leaves(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _as_error(event: Refused) -> RequestError:
    return RequestError(event.message, status=event.status, code=event.code, param=event.param)


def _cut_off() -> RequestError:
    return RequestError("The answer was cut off.", status=500, code="model_error")


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(f"{error.detail}: {request.method} to this path has no answer.", error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_failure(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body("The server failed. Its log says why.", 500, "server_error"), status_code=500)
