"""Connections that cost nothing to others: headers must come soon and be small, and answers must be read."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from glint.server.origin import use_target_host

HEADER_SECONDS = 10.0
HEADER_BYTES = 64 * 1024
STALL_SECONDS = 30.0
WRITE_NOW = "glint.write_now"


class BoundedConnection(HttpToolsProtocol):
    """An HTTP connection that is closed when the headers of a request are late or too large, or an answer stays unread.

    A client that reads slowly is waited for; one that takes nothing of a full buffer for `STALL_SECONDS` is dropped.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._is_in_headers = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for the first request."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_timer()
        self._stop_stall_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The buffer is full: the client must take something of it soon."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The client has read enough."""
        self._stop_stall_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        """A request has begun: its headers must be complete soon."""
        super().on_message_begin()
        self.scope["extensions"] = cast(Any, {WRITE_NOW: self.write_now})
        self._expect_headers()

    def write_now(self, events: bytes) -> bool:
        """Write a chunk of the answer that has begun; whether the client keeps up with what is written."""
        if events and not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(events), events))
        return not self.flow.write_paused

    def data_received(self, data: bytes) -> None:
        """Take in bytes; the parser keeps a header until it is whole, so it is given no more than one may have."""
        while data and not self.transport.is_closing():
            room = HEADER_BYTES - self._header_bytes if self._is_in_headers else len(data)
            if room <= 0:
                self.send_400_response("The headers are too large.")
                return
            piece, data = data[:room], data[room:]
            self._header_bytes += len(piece)
            super().data_received(piece)
        is_idle = self.cycle is None or self.cycle.response_complete
        has_timer = self._header_timer is not None or self.timeout_keep_alive_task is not None
        if is_idle and not has_timer and not self.transport.is_closing():
            self._expect_headers()

    def on_headers_complete(self) -> None:
        """The headers are there."""
        self._stop_timer()
        self._is_in_headers = False
        use_target_host(self.url, self.headers)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is there: the headers of another request may follow."""
        self._is_in_headers = True
        self._header_bytes = 0
        super().on_message_complete()

    def _expect_headers(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        self.transport.close()

    def _expect_reading(self) -> None:
        self._stop_stall_timer()
        unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self._check_reading, unread)

    def _check_reading(self, unread_before: int) -> None:
        if self.transport.get_write_buffer_size() < unread_before:
            self._expect_reading()
        else:
            self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
