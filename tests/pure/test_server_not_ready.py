"""What answers while no server is ready, over raw sockets: one answer for each request, and nothing that piles up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse

import pytest

from glint.server.http import listener
from glint.server.http.listener import listen
from glint.server.process import not_ready
from glint.server.process.lifecycle import Lifecycle, ReadinessGate
from glint.server.process.not_ready import NotReadyServer


class Running:
    """A server on a thread of its own."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.listener = listen("127.0.0.1", self.port)
        self._server = NotReadyServer(self.listener, ReadinessGate(lifecycle))
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))
        self._thread.start()
        assert self._has_begun.wait(20)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_over = asyncio.Event()
        self._has_begun.set()
        await self._is_over.wait()

    def open(self) -> None:
        """Accept connections."""
        self._call(self._server.open)

    def close(self) -> None:
        """Accept none."""
        self._call(self._server.close)

    def end(self) -> None:
        """Stop everything."""
        self._call(self._server.close)
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()
        self.listener.close()

    def connect(self) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), 20)

    def send(self, data: bytes) -> bytes:
        """What comes back for bytes, until the end of the connection."""
        with self.connect() as connection:
            connection.sendall(data)
            return receive(connection)

    def _call(self, function: Callable[[], None]) -> None:
        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)


def receive(connection: socket.socket) -> bytes:
    """Everything until the server closes; a reset is an error."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


@contextmanager
def running(phase: str = "loading") -> Iterator[Running]:
    """A server that accepts connections."""
    lifecycle = Lifecycle(60.0)
    if phase == "restarting":
        lifecycle.phase, lifecycle.failure, lifecycle.restarts = "restarting", "rank 1 of 8 failed", 2
    server = Running(lifecycle)
    server.open()
    try:
        yield server
    finally:
        server.end()


def ask(server: Running, method: str, path: str, body: bytes | None = None) -> tuple[HTTPResponse, bytes]:
    """An answer as the standard library's client reads it."""
    client = HTTPConnection("127.0.0.1", server.port, timeout=20)
    client.request(method, path, body)
    answer = client.getresponse()
    content = answer.read()
    client.close()
    return answer, content


@pytest.mark.parametrize("phase", ["loading", "restarting"])
def test_every_route(phase: str) -> None:
    with running(phase) as server:
        for path, status in (("/health", 200), ("/health?x=1", 200), ("/ready", 503)):
            answer, content = ask(server, "GET", path)
            report = json.loads(content)
            assert (answer.status, report["phase"], report["status"]) == (status, phase, "ok")
            assert answer.getheader("connection") == "close"
            assert (report.get("reason"), report["restarts"]) == (
                ("rank 1 of 8 failed", 2) if phase == "restarting" else (None, 0)
            )
        answer, content = ask(server, "POST", "/v1/chat/completions", b"{}")
        error = json.loads(content)["error"]
        assert (answer.status, answer.getheader("retry-after"), error["type"]) == (503, "1", "overloaded_error")
        assert (
            error["code"] == ("engine_failed" if phase == "restarting" else "not_ready") and phase in error["message"]
        )
        _, content = ask(server, "POST", "/v1/messages", b"{}")
        assert json.loads(content)["type"] == "error"
        answer, content = ask(server, "HEAD", "/health")
        assert answer.status == 200 and content == b"" and int(answer.getheader("content-length") or 0) > 0
        assert server.send(b"GET http://name:80/health HTTP/1.1\r\nHost: name\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_large_body_does_not_cost_the_answer() -> None:
    with running() as server:
        head = b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Length: 20000000\r\n\r\n"
        for body in (b"", b"x" * 10_000, b"x" * 20_000_000):
            assert server.send(head + body).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    "line", [b"", b"GET", b"GET /health", b"GET /health HTTP/2.0", b"\x16\x03\x01\x02", b"a b c d"]
)
def test_what_is_no_request(line: bytes) -> None:
    with running() as server:
        assert server.send(line + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_headers_are_bounded_in_bytes() -> None:
    with running() as server, server.connect() as large, pytest.raises((ConnectionResetError, BrokenPipeError)):
        for _ in range(500):
            large.sendall(b"GET /" + b"a" * 65536)


def test_headers_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_ready, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(not_ready, "CLOSE_SECONDS", 0.3)
    with running() as server:
        with server.connect() as slow:
            slow.sendall(b"GET /health HT")
            assert slow.recv(1) == b""
        with server.connect() as stays:
            stays.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert receive(stays).startswith(b"HTTP/1.1 200 ")


def test_more_connections_than_it_takes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_ready, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(listener, "RETRY_SECONDS", 0.05)
    with running() as server:
        idle = [server.connect() for _ in range(3)]
        with server.connect() as late:
            late.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            late.settimeout(0.5)
            with pytest.raises(TimeoutError):
                late.recv(1)
            late.settimeout(20)
            for connection in idle:
                connection.close()
            assert receive(late).startswith(b"HTTP/1.1 200 ")


def test_after_the_close_another_accepts_and_nobody_is_lost() -> None:
    with running() as server, server.connect() as held:
        held.sendall(b"GET /ready HTTP/1.1\r\n")
        ask(server, "GET", "/health")
        server.close()
        with server.connect() as waiting:
            waiting.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            held.sendall(b"\r\n")
            assert receive(held).startswith(b"HTTP/1.1 503 ")
            server.listener.setblocking(True)
            accepted, _ = server.listener.accept()
            with accepted:
                assert accepted.recv(65536).startswith(b"GET /health")
