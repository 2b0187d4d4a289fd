"""What a connection leaves behind when its client resets it."""

import asyncio
import socket
import struct
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from glint.server.connection import BoundedConnection

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
RESET = struct.pack("ii", 1, 0)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """An application whose answers are empty."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def connection_after_a_reset() -> tuple[bool, BoundedConnection]:
    """Whether the connection waited for a second request before its client reset it, and the connection after that."""
    config = Config(app=answer, lifespan="off", log_level="critical")
    config.load()
    made: list[BoundedConnection] = []

    def make() -> BoundedConnection:
        made.append(BoundedConnection(config, ServerState(), {}))
        return made[-1]

    loop = asyncio.get_running_loop()
    async with await loop.create_server(make, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        waited = made[0].timeout_keep_alive_task is not None
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
        while made[0] in made[0].connections:
            await asyncio.sleep(0.01)
    return waited, made[0]


def test_a_connection_that_was_reset_waits_for_no_request() -> None:
    waited, connection = asyncio.run(asyncio.wait_for(connection_after_a_reset(), 30))
    assert waited
    assert connection.timeout_keep_alive_task is None
