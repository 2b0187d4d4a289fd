"""Connections that cost nothing to others: the request line and headers must come soon and be small."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 10.0
HEADER_BYTES = 64 * 1024


class BoundedConnection(HttpToolsProtocol):
    """An HTTP connection that is closed when the headers of a request are late or too large."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for the first request."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request has begun: its headers must be complete soon."""
        super().on_message_begin()
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Take in bytes; the parser keeps a header until it is whole, so they are counted before it sees them."""
        if self._header_timer is not None:
            if self._header_bytes > HEADER_BYTES:
                self.send_400_response("The headers are too large.")
                return
            self._header_bytes += len(data)
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The headers are there."""
        self._stop_timer()
        super().on_headers_complete()

    def _expect_headers(self) -> None:
        self._stop_timer()
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        self.transport.close()
