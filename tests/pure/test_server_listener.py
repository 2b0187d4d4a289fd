"""Accepting connections: many in one turn of the event loop, and none that is lost when accepting ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvloop

from glint.server.http.listener import Acceptor, listen

COUNT = 200


class Greeting(asyncio.Protocol):
    """Says hello and closes."""

    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


def free_listener() -> socket.socket:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return listen("127.0.0.1", port)


async def greet_all(open_server: Callable[[socket.socket], Any]) -> tuple[int, list[bytes]]:
    """Let many clients wait in the kernel, then accept them: turns of the loop until all are greeted, and what came."""
    listener = free_listener()
    clients = [socket.create_connection(listener.getsockname(), timeout=20) for _ in range(COUNT)]
    server = await open_server(listener)
    left = set(clients)
    turns = 0
    for client in clients:
        client.setblocking(False)
    while left and turns < 10 * COUNT:
        turns += 1
        await asyncio.sleep(0)
        for client in list(left):
            try:
                client.recv(1, socket.MSG_PEEK)
                left.remove(client)
            except BlockingIOError:
                pass
    server.close()
    received = [client.recv(16) for client in clients]
    for client in clients:
        client.close()
    listener.close()
    return turns, received


def run(open_server: Callable[[socket.socket], Any]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        turns, received = runner.run(greet_all(open_server))
    assert received == [b"hello"] * COUNT
    return turns


async def open_own(listener: socket.socket) -> Acceptor:
    acceptor = Acceptor(listener, Greeting)
    acceptor.open()
    return acceptor


async def open_of_uvloop(listener: socket.socket) -> Any:
    return await asyncio.get_running_loop().create_server(Greeting, sock=listener, backlog=2048)


def test_connections_that_wait_are_accepted_together() -> None:
    """Each turn of uvloop's own server accepts few; where that changes, so may ours."""
    own, of_uvloop = run(open_own), run(open_of_uvloop)
    assert own < COUNT / 4 < of_uvloop


def test_nothing_is_accepted_after_the_end() -> None:
    async def close_at_once(listener: socket.socket) -> bool:
        acceptor = Acceptor(listener, Greeting)
        acceptor.open()
        acceptor.close()
        await acceptor.wait_closed()
        with socket.create_connection(listener.getsockname(), timeout=5) as client:
            client.setblocking(False)
            for _ in range(50):
                await asyncio.sleep(0)
            try:
                return bool(client.recv(1))
            except BlockingIOError:
                return False

    with free_listener() as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert not runner.run(close_at_once(listener))


def test_connections_hold_nothing_back() -> None:
    """A token is on its way when it is written."""

    async def read_option(listener: socket.socket) -> int:
        options: list[int] = []

        class Reading(Greeting):
            def connection_made(self, transport: Any) -> None:
                accepted = transport.get_extra_info("socket")
                options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                super().connection_made(transport)

        acceptor = Acceptor(listener, Reading)
        acceptor.open()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b"hello"
        writer.close()
        acceptor.close()
        return options[0]

    with free_listener() as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(read_option(listener))
