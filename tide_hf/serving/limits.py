"""What is refused before anyone reads it: strangers, floods, other sites' pages, and what is too large."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from ..errors import RequestError, describe
from .metrics import Metrics
from .protocol import error_body

MAX_HEADER_BYTES = 16_384
MAX_CLIENTS = 10_000  # addresses whose rate is remembered
OPEN_TO_ALL = "/health"
PATHS = ("/v1/chat/completions", "/v1/models", "/metrics", OPEN_TO_ALL)
CLIENT_LEFT = 499


@dataclass(frozen=True)
class Limits:
    """What the server puts up with.

    Attributes:
        api_key: What clients must send as `Authorization: Bearer ...`; `None` lets everyone in.
        hosts: What the Host header may name; `None` is anything. A server on localhost that takes any name can be
            reached by every web page the user opens, through a name that its owner points at localhost.
        max_body_bytes: Largest request.
        client_seconds: Longest time that a client may take to send a request, or to read what was written for it.
        max_requests: Chat requests that wait or are being answered.
        requests_per_minute: For each client address, in bursts of at most as many; 0 is any number.
    """

    api_key: str | None = None
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 1_000_000
    client_seconds: float = 30.0
    max_requests: int = 64
    requests_per_minute: int = 600


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class RateLimiter:
    """A bucket of requests for each client, filled at a constant rate.

    Args:
        per_minute: The rate, and the size of the bucket; 0 is no limit.
        clock: Seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self.per_minute = per_minute
        self.clock = clock
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admits(self, client: str) -> bool:
        """Whether `client` may send one more request now."""
        if not self.per_minute:
            return True
        now = self.clock()
        left, then = self.buckets.pop(client, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * self.per_minute / 60)
        admitted = left >= 1
        self.buckets[client] = (left - admitted, now)
        if len(self.buckets) > MAX_CLIENTS:
            self.buckets.popitem(last=False)
        return admitted


class Guard:
    """Stands in front of an ASGI app: looks at headers, never at bodies, and counts responses.

    Args:
        app: What is guarded.
        limits: What is allowed.
        metrics: Where responses are counted.
    """

    def __init__(self, app: Any, limits: Limits, metrics: Metrics) -> None:
        self.app = app
        self.limits = limits
        self.metrics = metrics
        self.rate = RateLimiter(limits.requests_per_minute)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def counted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        app = self.app
        try:
            self._check(scope)
        except RequestError as error:
            app = error_response(error)
        try:
            await app(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.metrics.responses.labels(path, str(status)).inc()

    def _check(self, scope: Any) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            got, expected = "too many", f"at most {MAX_HEADER_BYTES} bytes in all"
            raise _refused("the headers are too large", got, expected, 431, "headers_too_large")
        if scope["path"] == OPEN_TO_ALL:
            return
        if not self.rate.admits(scope["client"][0] if scope.get("client") else ""):
            limit = f"{self.limits.requests_per_minute} a minute"
            raise _refused("there are too many requests", "one more", limit, 429, "rate_limit_exceeded")
        if self.limits.hosts is not None and not _names(headers, self.limits.hosts):
            hosts = " or ".join(self.limits.hosts)
            raise _refused(
                "the Host header names another server", "a name that is not ours", hosts, 400, "invalid_host"
            )
        if self.limits.api_key is not None and not _is_authorised(headers, self.limits.api_key):
            got = "no API key, or a wrong one"
            raise _refused("the request is not authorised", got, "the key of this server", 401, "invalid_api_key")


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read a request's body, no further than its limit.

    Raises:
        RequestError: It is too large, takes too long, or is not declared as JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # any web page may send other types to localhost, without being asked for leave
        raise _refused(
            "the body cannot be read", "another Content-Type", "application/json", 415, "invalid_content_type"
        )
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length[:20]) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        return await asyncio.wait_for(_read(request, limits), limits.client_seconds)
    except asyncio.TimeoutError as error:
        expected = f"all of it within {limits.client_seconds:g} seconds"
        raise _refused("the body does not arrive", "a part of it", expected, 408, "request_timeout") from error
    except ClientDisconnect as error:
        raise _refused("the body does not arrive", "a part of it", "all of it", 400, "incomplete_body") from error


async def _read(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.max_body_bytes:
            raise _too_large(limits)
    return bytes(body)


def error_response(error: RequestError) -> JSONResponse:
    """A refusal as an HTTP response."""
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not wanted
    content = error_body(str(error), error.status, error.code, error.param)
    return JSONResponse(content, status_code=error.status, headers=headers)


def _refused(problem: str, got: str, expected: str, status: int, code: str) -> RequestError:
    message = describe(problem, got=got, expected=expected, do="Correct the request, or ask who runs this server.")
    return RequestError(message, status=status, code=code)


def _too_large(limits: Limits) -> RequestError:
    expected = f"at most {limits.max_body_bytes} bytes"
    return _refused("the body is too large", "more", expected, 413, "request_too_large")


def _names(headers: list[tuple[bytes, bytes]], hosts: tuple[str, ...]) -> bool:
    values = [value for name, value in headers if name == b"host"]
    if len(values) != 1:
        return False
    host = values[0].decode("latin-1").lower()
    host = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    return host in hosts


def _is_authorised(headers: list[tuple[bytes, bytes]], api_key: str) -> bool:
    """Compare in constant time, as bytes (headers may hold any), and by digest so that lengths do not show either."""
    values = [value for name, value in headers if name == b"authorization"]
    scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
    equal = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), hashlib.sha256(api_key.encode()).digest())
    return equal and scheme.lower() == b"bearer"
