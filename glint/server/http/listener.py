"""The listening socket of a server, and the loop that accepts its connections."""

import asyncio
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from glint.errors import EngineError, RequestError
from glint.server.http.tls import HANDSHAKE_SECONDS

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


@contextmanager
def listening(host: str, port: int, uds: Path | None, uds_mode: int) -> Iterator[socket.socket]:
    """A listening socket on a Unix socket's path, or else on an address. The path is removed at the end."""
    if uds is None:
        with listen(host, port) as listener:
            yield listener
        return
    with listen_unix(uds, uds_mode) as listener:
        made = uds.stat()
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(uds.stat(), made):
                    uds.unlink()


def listen_unix(path: Path, mode: int) -> socket.socket:
    """Bind a Unix socket that is made with this mode. A socket that nobody listens on any more is replaced."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o777 & ~mode)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as problem:
        listener.close()
        reason = problem.strerror or problem
        message = (
            f"cannot listen on --uds {path}: {reason}; give a path of at most 107 bytes in a folder you may write to"
        )
        raise EngineError(message) from problem
    finally:
        os.umask(mask)
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket that no process listens on; refuse any other file, and a socket that is in use."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return
    if not is_socket:
        raise RequestError(f"--uds {path} is there and is no socket; give another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with suppress(OSError):
                path.unlink()
            return
        except OSError as problem:
            reason = problem.strerror or problem
            raise EngineError(f"cannot tell who uses --uds {path}: {reason}; give another path") from problem
    raise EngineError(f"--uds {path} is in use by another process; give another path, or stop it")


class Acceptor:
    """Accepts the connections of a listening socket between `open` and `close`.

    It accepts up to `ACCEPTED_AT_ONCE` connections in one turn of the event loop. The server of uvloop accepts one a
    turn. A turn that writes hundreds of streams takes milliseconds, so a flood of connections would wait for seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_connection: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
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
        """Make the transport of a connection. One that has ended meanwhile, or that fails to speak TLS, is dropped."""
        seconds = None if self._tls is None else HANDSHAKE_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                self._make_connection, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError:
            accepted.close()
