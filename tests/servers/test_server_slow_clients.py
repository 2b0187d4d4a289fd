"""Clients that are slow, silent or gone cost others nothing, and the server lets go of them after its timeouts."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.raw_http import read_to_end, read_until, request_bytes, wait_for
from tests.e2e.served import Served, served
from tests.e2e.small_glm import write_small_glm

NUM_CLIENTS = 24
NUM_REQUESTS = 40
STALL_SECONDS = 30.0
SPARE_SECONDS = 25.0
ALLOWED_GROWTH_BYTES = 64 * 2**20
LISTENING = "0A"
NO_OWNER = "0"
LONG_ANSWER: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 600,
    "ignore_eos": True,
    "temperature": 1.0,
    "logprobs": True,
    "top_logprobs": 20,
    "stream": True,
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a small model, so that steps are short and slow clients would show."""
    folder = tmp_path_factory.mktemp("slow")
    model = write_small_glm(folder / "model")
    with served(folder / "server.log", "--model", str(model), "--max-num-seqs", "64") as running:
        yield running


class Ordinary:
    """A client that sends one request after another and wants every answer whole."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self.expected = self._ask()

    def _ask(self) -> list[int]:
        body = {"prompt": [7, 8, 9], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self._server.url}/generate", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    def check(self) -> None:
        """Many requests one after the other are all answered alike."""
        for _ in range(NUM_REQUESTS):
            assert self._ask() == self.expected


def connect(server: Served) -> socket.socket:
    """A connection whose client side holds next to nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    return connection


def silent(server: Served) -> socket.socket:
    """Connects and says nothing."""
    return connect(server)


def in_headers(server: Served) -> socket.socket:
    """Sends the beginning of its headers; `drip` sends the rest byte by byte."""
    connection = connect(server)
    connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    return connection


def in_body(server: Served) -> socket.socket:
    """Sends its headers and the beginning of a body; `drip` sends the rest byte by byte."""
    connection = connect(server)
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b'Content-Length: 100000\r\n\r\n{"prompt":"')
    return connection


def unread(server: Served) -> socket.socket:
    """Asks for a long stream and never reads a byte of it."""
    connection = connect(server)
    connection.sendall(request_bytes("/v1/chat/completions", LONG_ANSWER))
    return connection


class Drip:
    """Sends a byte on every connection now and then, until the server closes them or the block ends."""

    def __init__(self, connections: list[socket.socket]) -> None:
        self._connections = connections
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Drip:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.2):
            for connection in self._connections:
                try:
                    connection.send(b"a", socket.MSG_DONTWAIT)
                except OSError:
                    continue


def num_connections(server: Served) -> int:
    """Connections that the server's process holds, as the kernel lists them; those that it has closed have no owner."""
    rows = [line.split() for line in Path(f"/proc/{server.process.pid}/net/tcp").read_text().splitlines()[1:]]
    own_port = f":{server.port:04X}"
    return sum(row[1].endswith(own_port) and row[3] != LISTENING and row[9] != NO_OWNER for row in rows)


def test_others_are_served_beside_slow_clients_which_are_let_go(quick: Served) -> None:
    """With many slow clients of every kind an ordinary one is served; then the server lets go of them all."""
    ordinary = Ordinary(quick)
    quick.wait_idle()
    memory_before = quick.memory_bytes()
    lines_before = len(quick.outcome_lines())
    clients = {kind: [kind(quick) for _ in range(NUM_CLIENTS)] for kind in (silent, in_headers, in_body, unread)}
    everyone = [client for group in clients.values() for client in group]
    try:
        with Drip(clients[in_headers] + clients[in_body]):
            wait_for(lambda: num_connections(quick) >= len(everyone), "the clients are connected")
            quick.wait_idle()
            ordinary.check()
            assert quick.memory_bytes() - memory_before < ALLOWED_GROWTH_BYTES
            wait_for(lambda: num_connections(quick) == 0, "the slow clients are let go", STALL_SECONDS + SPARE_SECONDS)
    finally:
        for client in everyone:
            client.close()
    stats: dict[str, Any] = quick.wait_idle()
    assert stats["pages"]["held"] == 0
    slow = [line for line in quick.outcome_lines()[lines_before:] if line["outcome"] not in ("finished", "length")]
    reasons = Counter(line["reason"] for line in slow)
    assert reasons == {"body_timeout": NUM_CLIENTS, "client_left": NUM_CLIENTS}


def test_a_slow_reader_gets_its_whole_answer(quick: Served) -> None:
    """A client that reads less than the server writes is waited for, and nothing is lost."""
    with connect(quick) as connection:
        connection.settimeout(60)
        connection.sendall(request_bytes("/v1/chat/completions", LONG_ANSWER, {"Connection": "close"}))
        time.sleep(2.0)
        received = bytearray()
        while piece := connection.recv(16384):
            received += piece
            if len(received) < 400_000:
                time.sleep(0.02)
    assert received.count(b'"top_logprobs"') == LONG_ANSWER["max_tokens"]
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_an_idle_connection_cannot_be_kept_by_empty_lines(quick: Served) -> None:
    with connect(quick) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(connection, b"seconds_since_last_step")
        connection.sendall(b"\r\n")
        read_to_end(connection)
