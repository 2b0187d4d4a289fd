"""The listening socket of a server, and the loop that accepts its connections."""

import asyncio
import socket
from collections.abc import Callable

from glint.errors import EngineError, RequestError

BACKLOG = 2048
SEND_BUFFER_BYTES = 256 * 1024
HIGHEST_PORT = 65535
ACCEPTED_AT_ONCE = 64
RETRY_SECONDS = 0.5


def check_port(port: int) -> None:
    """Refuse an invalid port."""
    if not 1 <= port <= HIGHEST_PORT:
        raise RequestError(f"--port is {port}; it must be from 1 to {HIGHEST_PORT}")


def listen(host: str, port: int) -> socket.socket:
    """Bind the address, before anything is loaded, so that an address in use is an error at once.

    Connections inherit TCP_NODELAY and the size of the send buffer, which bounds what the kernel keeps for a client
    that does not read.
    """
    check_port(port)
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as problem:
        raise EngineError(
            f"cannot listen on {host} port {port}: {problem.strerror or problem}; give another --host or --port, or "
            "stop what uses it"
        ) from problem
    return listener


class Acceptor:
    """Accepts the connections of a listening socket between `open` and `close`.

    It accepts up to `ACCEPTED_AT_ONCE` connections in one turn of the event loop. The server of uvloop accepts one a
    turn. A turn that writes hundreds of streams takes milliseconds, so a flood of connections would wait for seconds.
    """

    def __init__(self, listener: socket.socket, make_connection: Callable[[], asyncio.Protocol]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._make_connection = make_connection
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_open = False

    def open(self) -> None:
        """Begin to accept, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._resume()

    def close(self) -> None:
        """Accept nothing from now on. Accepted connections go on."""
        self._is_open = False
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait until every accepted connection has its transport."""
        await asyncio.gather(*self._connecting)

    def _has_room(self) -> bool:
        """Whether one more connection may be accepted."""
        return True

    def _resume(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(RETRY_SECONDS, self._resume)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._has_room():
                return self._pause()
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            except OSError:
                return self._pause()
            task = self._loop.create_task(self._connect(accepted))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        return None

    async def _connect(self, accepted: socket.socket) -> None:
        """Make the transport of a connection. A connection that has ended meanwhile is dropped."""
        try:
            await self._loop.connect_accepted_socket(self._make_connection, accepted)
        except OSError:
            accepted.close()
