"""What answers on the listening socket while no server is ready: one answer, then the connection ends.

It has no HTTP library under it, so that the process that runs it starts at once.
"""

import asyncio
import socket
from http import HTTPStatus

from starlette.types import Message, Scope

from glint.server.process.lifecycle import Lifecycle, ReadinessGate

HEADER_SECONDS = 10.0
HEADER_BYTES = 64 * 1024
CLOSE_SECONDS = 2.0
UNREAD_BYTES = 64 * 1024 * 1024
MAX_CONNECTIONS = 500
RETRY_SECONDS = 0.5
HEADER_END = b"\r\n\r\n"


class NotReadyServer:
    """Accepts connections between `open` and `close`; those that it has are answered after that, too."""

    def __init__(self, listener: socket.socket, lifecycle: Lifecycle) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._front_door = ReadinessGate(lifecycle)
        self._connections: set[NotReadyConnection] = set()
        self._is_open = False

    def open(self) -> None:
        """Begin to accept."""
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept nothing from now on."""
        self._is_open = False
        asyncio.get_running_loop().remove_reader(self._listener)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if len(self._connections) >= MAX_CONNECTIONS:
                raise OSError(f"there are {MAX_CONNECTIONS} connections")
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            loop.remove_reader(self._listener)
            loop.call_later(RETRY_SECONDS, self._accept_again)
            return
        connection = NotReadyConnection(self._front_door)
        self._connections.add(connection)
        serving = loop.create_task(self._serve(connection, accepted))
        serving.add_done_callback(lambda done: self._connections.discard(connection))

    def _accept_again(self) -> None:
        if self._is_open:
            self.open()

    async def _serve(self, connection: "NotReadyConnection", accepted: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        await connection.is_over.wait()


class NotReadyConnection(asyncio.Protocol):
    """One connection: the headers are read, the answer is written, and what still comes is thrown away for a moment.

    A connection that is closed with unread bytes is reset, which can cost the client the answer.
    """

    def __init__(self, front_door: ReadinessGate) -> None:
        self.is_over = asyncio.Event()
        self._front_door = front_door
        self._received = b""
        self._num_unread = 0
        self._answer = b""
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the headers."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(HEADER_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._timer.cancel()
        self.is_over.set()

    def data_received(self, data: bytes) -> None:
        """Answer once the headers are there."""
        if self._answering is not None:
            self._num_unread += len(data)
            if self._num_unread > UNREAD_BYTES:
                self._transport.abort()
            return
        self._received += data
        head, separator, _ = self._received.partition(HEADER_END)
        if separator:
            self._received = b""
            self._answering = asyncio.create_task(self._reply(head.decode("latin-1").partition("\r\n")[0]))
        elif len(self._received) > HEADER_BYTES:
            self._transport.abort()

    def eof_received(self) -> bool:
        """The client sends nothing more; before it has an answer the connection stays half open."""
        return self._answering is not None and not self._answer

    async def _reply(self, request_line: str) -> None:
        words = request_line.split(" ")
        if len(words) == 3 and words[2].startswith("HTTP/1."):
            path = "/" + words[1].partition("://")[2].partition("/")[2] if "://" in words[1] else words[1]
            scope: Scope = {"type": "http", "method": words[0], "path": path.partition("?")[0]}
            await self._front_door(scope, _receive_nothing, self._send)
            self._transport.write(
                self._answer.partition(HEADER_END)[0] + HEADER_END if words[0] == "HEAD" else self._answer
            )
        else:
            self._answer = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self._transport.write(self._answer)
        self._transport.write_eof()
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._transport.abort)

    async def _send(self, message: Message) -> None:
        """Take in a message of the application."""
        if message["type"] == "http.response.start":
            status = HTTPStatus(message["status"])
            headers = [*message["headers"], (b"connection", b"close")]
            lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), *(b"%b: %b" % pair for pair in headers)]
            self._answer = b"\r\n".join(lines) + HEADER_END
        else:
            self._answer += message["body"]


async def _receive_nothing() -> Message:
    return {"type": "http.disconnect"}
