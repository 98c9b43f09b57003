"""uvicorn, which tells clients that it stops before it cuts them off."""

from __future__ import annotations

import socket

import uvicorn

from .app import Backend

PATIENCE = 8  # seconds for answers that are under way


class HTTPServer(uvicorn.Server):
    """Serves an app.

    Args:
        config: What, and how.
        backend: What answers.
    """

    def __init__(self, config: uvicorn.Config, backend: Backend) -> None:
        super().__init__(config)
        self.backend = backend

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what waits, and give what runs some time; then close all connections."""
        await self.backend.drain(PATIENCE)
        await super().shutdown(sockets)
