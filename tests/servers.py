"""Servers on a port of this machine, for clients that speak HTTP."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from functools import partial

import httpx2 as httpx
import openai
import uvicorn

from tide_hf.serving.app import create_app
from tide_hf.serving.batching import Batcher
from tide_hf.serving.http_server import HTTPServer
from tide_hf.serving.limits import Limits


@contextmanager
def running(app, make_server=uvicorn.Server, **settings):
    """Serve an ASGI app on a free port in a thread; give its address."""
    server = make_server(uvicorn.Config(app, port=0, http="h11", ws="none", log_level="warning", **settings))
    started = threading.Event()

    async def startup(sockets=None, original=server.startup):
        await original(sockets)
        started.set()

    server.startup = startup
    thread = threading.Thread(target=server.run)
    thread.start()
    assert started.wait(30)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def chat(text):
    return [{"role": "user", "content": text}]


@contextmanager
def serving(served, **limits):
    """A server for a model; gives its address, the batcher and the app."""
    batcher = Batcher(served)
    app = create_app(batcher, "tiny", Limits(**{"requests_per_minute": 0, **limits}))
    with running(app, partial(HTTPServer, backend=batcher)) as url:
        yield url, batcher, app


def client(url, key="-", **settings):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, **settings)


def ask(connection, text, **fields):
    return connection.chat.completions.create(model="tiny", messages=chat(text), **{"temperature": 0, **fields})


def metrics_of(url, **headers):
    lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextmanager
def connected(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def request_head(length, *more):
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
