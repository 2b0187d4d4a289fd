"""Answers on the listening socket while no server is ready: one response, then the connection ends.

It uses no HTTP library, so that the supervisor starts at once.
"""

import asyncio
import socket
import ssl
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Scope

from glint.server.http.listener import Acceptor

HEADER_SECONDS = 10.0
HEADER_BYTES = 64 * 1024
CLOSE_SECONDS = 2.0
UNREAD_BYTES = 64 * 1024 * 1024
MAX_CONNECTIONS = 500
HEADER_END = b"\r\n\r\n"


class NotReadyServer(Acceptor):
    """Accepts at most `MAX_CONNECTIONS` connections at a time and answers each of them once, also after `close`."""

    def __init__(self, listener: socket.socket, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        self._connections: set[NotReadyConnection] = set()
        super().__init__(listener, lambda: NotReadyConnection(app, self._connections), tls)

    def _has_room(self) -> bool:
        return len(self._connections) + len(self._connecting) < MAX_CONNECTIONS


class NotReadyConnection(asyncio.Protocol):
    """One connection, which is among `connections` until it ends. It reads the headers and writes the response.

    Then it drops what the client still sends, for `CLOSE_SECONDS`: closing a connection with unread bytes resets it,
    and the client may lose the response.
    """

    def __init__(self, app: ASGIApp, connections: "set[NotReadyConnection]") -> None:
        self._app = app
        self._connections = connections
        self._received = b""
        self._num_unread = 0
        self._response = b""
        self._responding: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the headers."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the connections."""
        self._timer.cancel()
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Answer once the headers are complete."""
        if self._responding is not None:
            self._num_unread += len(data)
            if self._num_unread > UNREAD_BYTES:
                self._transport.abort()
            return
        self._received += data
        head, separator, _ = self._received.partition(HEADER_END)
        if separator:
            self._received = b""
            self._responding = asyncio.create_task(self._reply(*head.split(b"\r\n")))
        elif len(self._received) > HEADER_BYTES:
            self._transport.abort()

    def eof_received(self) -> bool:
        """The client sends nothing more. The connection stays half open until the response is written."""
        return self._responding is not None and not self._response

    async def _reply(self, request_line: bytes, *header_lines: bytes) -> None:
        words = request_line.decode("latin-1").split(" ")
        if len(words) == 3 and words[2].startswith("HTTP/1."):
            path = "/" + words[1].partition("://")[2].partition("/")[2] if "://" in words[1] else words[1]
            headers = [
                (name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in header_lines)
            ]
            scope: Scope = {"type": "http", "method": words[0], "path": path.partition("?")[0], "headers": headers}
            await self._app(scope, _receive_nothing, self._send)
            self._transport.write(
                self._response.partition(HEADER_END)[0] + HEADER_END if words[0] == "HEAD" else self._response
            )
        else:
            self._response = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self._transport.write(self._response)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._transport.abort)

    async def _send(self, message: Message) -> None:
        """Add a message of the application to the response."""
        if message["type"] == "http.response.start":
            status = HTTPStatus(message["status"])
            headers = [*message["headers"], (b"connection", b"close")]
            lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%b: %b" % pair for pair in headers)]
            self._response = b"\r\n".join(lines) + HEADER_END
        else:
            self._response += message["body"]


async def _receive_nothing() -> Message:
    return {"type": "http.disconnect"}
