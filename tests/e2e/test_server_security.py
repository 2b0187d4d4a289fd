"""Who may talk to a server and what it gives away, with a real process and raw sockets."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.raw_http import (
    check_all_free,
    connect,
    outcomes_since,
    read_to_end,
    read_until,
    request_bytes,
    wait_for,
)
from tests.e2e.served import Served


def test_browsers_are_let_in_nowhere_by_default(server: Served) -> None:
    headers = {"Origin": "https://page.internal", "Access-Control-Request-Method": "POST"}
    for answer in (
        httpx.options(f"{server.url}/v1/chat/completions", headers=headers, timeout=30),
        httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_only_this_machine_is_listened_to(server: Served) -> None:
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            listening += [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{server.port:04X}")]
    assert listening == [f"0100007F:{server.port:04X}"]


BAD_BODIES: dict[str, bytes] = {
    "no JSON": b"{",
    "nothing": b"",
    "a list": b"[]",
    "not UTF-8": b'{"prompt": "\xff"}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "not a number": b'{"prompt": "x", "temperature": NaN}',
    "a huge number": b'{"prompt": "x", "temperature": 1e999}',
    "a huge integer": b'{"prompt": "x", "max_tokens": ' + b"9" * 400 + b"}",
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a wrong token": b'{"prompt": [-1]}',
    "a wrong seed": b'{"prompt": "x", "seed": 1.5}',
    "a nul": b'{"prompt": "\\u0000", "max_tokens": 0}',
}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_error_bodies_show_no_internals(server: Served, path: str, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}{path}", content=BAD_BODIES[name], headers=headers, timeout=60)
    assert answer.status_code == 400
    for word in ("Traceback", "glint/", ".py", "msgspec", "/home", "/root", "/tmp", "site-packages", "object at 0x"):
        assert word not in answer.text


def test_unknown_routes_and_methods(server: Served) -> None:
    assert httpx.get(f"{server.url}/v1/nothing", timeout=30).json()["error"]["code"] == "not_found"
    wrong = httpx.get(f"{server.url}/v1/chat/completions", timeout=30)
    assert wrong.status_code == 405 and "error" in wrong.json()
    assert "server" not in wrong.headers


def test_headers_are_bounded(server: Served) -> None:
    for size, expected in ((60_000, b"HTTP/1.1 200 "), (70_000, b"HTTP/1.1 431 "), (400_000, b"HTTP/1.1 431 ")):
        with connect(server) as connection:
            head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: {'x' * size}\r\n\r\n"
            connection.sendall(head.encode())
            assert read_to_end(connection).startswith(expected)


def test_requests_sent_without_waiting_are_all_answered(server: Served) -> None:
    """Many small requests in a row have more bytes than one header may have."""
    count = 2000
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Pad: " + b"y" * 40 + b"\r\n\r\n"
    with connect(server) as connection:
        sender = threading.Thread(target=connection.sendall, args=(one * count,))
        sender.start()
        received = b""
        while received.count(b"HTTP/1.1 ") < count:
            piece = connection.recv(65536)
            assert piece, f"only {received.count(b'HTTP/1.1 ')} answers"
            received += piece
        sender.join()
    assert received.count(b"HTTP/1.1 200 ") >= count and b"HTTP/1.1 400" not in received


def test_many_headers_are_bounded(server: Served) -> None:
    with connect(server) as connection:
        lines = b"".join(b"X-%d: y\r\n" % index for index in range(500))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answer


def test_bodies_are_bounded(server: Served) -> None:
    limit = 4 * 2**20
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(server) as connection:
        connection.sendall(f"{head}Content-Length: {limit + 1}\r\n\r\n".encode())
        assert read_until(connection, b"body_too_large").startswith(b"HTTP/1.1 413 ")
    with connect(server) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                connection.sendall(piece)
        received = read_to_end(connection)
        assert received.startswith(b"HTTP/1.1 413 ") or not received
    large = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * (limit - 100)}).encode()
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.url}/generate", content=large, headers=headers, timeout=60).status_code == 200


def test_a_client_that_does_not_read_delays_nobody(server: Served) -> None:
    server.wait_idle()
    before = server.count_outcomes()
    body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 20}
    with connect(server) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(request_bytes("/generate", body))
        wait_for(lambda: server.stats()["requests_running"] == 1, "the deaf request runs")
        answer = httpx.post(f"{server.url}/generate", json={"prompt": "x", "max_tokens": 3}, timeout=60)
        assert answer.status_code == 200
    outcomes_since(server, before, 2)
    check_all_free(server)
