"""Servers on a port of this machine, for clients that speak HTTP."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import uvicorn


@contextmanager
def running(app, **settings):
    """Serve an ASGI app on a free port in a thread; give its address."""
    config = uvicorn.Config(app, port=0, http="h11", ws="none", log_level="warning", **settings)
    server = uvicorn.Server(config)
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
