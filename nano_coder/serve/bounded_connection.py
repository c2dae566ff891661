"""A connection of uvicorn that is closed where no whole head of a request comes in time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""from the connection, or the answer before, to the end of a request's headers"""


class BoundedConnection(H11Protocol):
    """uvicorn bounds only the idle time between requests: dripping bytes would hold a connection for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        self.loop.call_later(HEAD_SECONDS, self._close_unless_after, self.cycle)

    def _close_unless_after(self, before: object) -> None:
        if self.cycle is before:
            self.transport.close()
