"""The listening socket of a server."""

import socket

from glint.errors import EngineError, RequestError

BACKLOG = 2048
SEND_BUFFER_BYTES = 256 * 1024
HIGHEST_PORT = 65535


def check_port(port: int) -> None:
    """Refuse what is no port."""
    if not 1 <= port <= HIGHEST_PORT:
        raise RequestError(f"--port is {port}; it must be from 1 to {HIGHEST_PORT}")


def listen(host: str, port: int) -> socket.socket:
    """Bind the address before anything is loaded, so that one in use is known at once.

    Connections inherit the size of the send buffer, which bounds what the kernel keeps for a client that does not read.
    """
    check_port(port)
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as problem:
        raise EngineError(
            f"cannot listen on {host} port {port}: {problem.strerror or problem}; give another --host or --port, or "
            "stop what uses it"
        ) from problem
    return listener
