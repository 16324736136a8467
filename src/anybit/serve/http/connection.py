"""A connection to the server, which ends where nobody speaks or nobody listens."""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0  # that the headers of a request may take
UNREAD_SECONDS = 120  # after which a client is gone that takes nothing of what was sent


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for headers, and for a client that does not read."""

    _late: asyncio.TimerHandle | None = None  # ends it; runs while headers are waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected = transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_headers(self) -> None:
        """From the first of their bytes on, or the beginning of the connection."""
        if not self._between_requests:
            self._stop_waiting()
        elif self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self._end)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        if self._between_requests:
            self.transport.close()
