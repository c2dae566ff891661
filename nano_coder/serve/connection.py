"""A server on a socket, whose connections are closed where no whole head of a request comes in time."""

from __future__ import annotations

import asyncio
import resource
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""from the connection, or the answer before, to the end of a request's headers"""


class BoundedConnection(H11Protocol):
    """uvicorn bounds only the idle time between requests: dripping bytes would hold a connection for ever.

    Where most of the files that this process may open are connections, the one that is idle longest goes.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4:
            idle = [each for each in self.connections if isinstance(each, BoundedConnection) and each.is_idle]
            min(idle, key=lambda each: each.idle_since).transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _await_request(self) -> None:
        self.idle_since = self.loop.time()
        self.loop.call_later(HEAD_SECONDS, self._close_unless_after, self.cycle)

    def _close_unless_after(self, before: object) -> None:
        if self.cycle is before:
            self.transport.close()


def run_server(app: ASGIApp, listening: socket.socket) -> None:
    """Answer until a signal ends it."""
    config = uvicorn.Config(
        app, log_level="warning", http=BoundedConnection, h11_max_incomplete_event_size=64 << 10
    )
    uvicorn.Server(config).run(sockets=[listening])
