"""Who may talk to a server and what it gives away, with a real process and raw sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from glint.server.app import GENERATING
from tests.e2e.raw_http import (
    check_all_free,
    connect,
    outcomes_since,
    read_to_end,
    read_until,
    request_bytes,
    wait_for,
)
from tests.e2e.served import Served, served

FLAG_KEY, FILE_KEY, FIRST_KEY, SECOND_KEY = "flag-key", "file-key", "first-key", "second-key"
KEYS = (FLAG_KEY, FILE_KEY, FIRST_KEY, SECOND_KEY)
WATCHING = ("/v1/models", "/v1/models/any", "/metrics", "/stats")


class Guarded:
    """A server whose every route needs a key, and a client without one."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.client = httpx.Client(base_url=server.url, timeout=60)

    def as_owner(self, key: str) -> dict[str, str]:
        """The header that carries a key."""
        return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with keys from a flag, a file and the environment."""
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "keys"
    file.write_text(f"{FILE_KEY}\n\n")
    file.chmod(0o600)
    flags = ("--api-key", FLAG_KEY, "--api-key-file", str(file))
    environment = {"GLINT_API_KEY": f"{FIRST_KEY}, {SECOND_KEY}"}
    with served(folder / "server.log", *flags, environment=environment) as running:
        made = Guarded(running)
        with made.client:
            yield made


def test_the_routes_are_those_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from glint.server import app as module
    from glint.server.auth import ApiKeys

    made: list[Starlette] = []

    class Remembered(Starlette):
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            made.append(self)

    monkeypatch.setattr(module, "Starlette", Remembered)
    module.make_app(None, ApiKeys([]), True, ())
    paths = {route.path for route in made[0].routes if isinstance(route, Route)}
    assert paths == {path for path, *_ in GENERATING} | {"/v1/models", "/v1/models/{name:path}", "/metrics", "/stats"}


@pytest.mark.parametrize("path", [path for path, *_ in GENERATING])
def test_every_generating_route_needs_a_key(guarded: Guarded, path: str) -> None:
    for headers in ({}, guarded.as_owner("wrong"), {"x-api-key": "wrong"}, {"Authorization": f"Basic {FLAG_KEY}"}):
        answer = guarded.client.post(path, json={}, headers=headers)
        assert answer.status_code == 401 and "www-authenticate" in answer.headers
        assert answer.json()["error"]["type"] == "authentication_error"
    for key in KEYS:
        assert guarded.client.post(path, json={}, headers=guarded.as_owner(key)).status_code == 400
    assert guarded.client.post(path, json={}, headers={"x-api-key": FLAG_KEY}).status_code == 400


@pytest.mark.parametrize("path", [*WATCHING, "/", "/docs", "/openapi.json", "/health/", "//health", "/ready/x"])
def test_every_other_path_needs_a_key(guarded: Guarded, path: str) -> None:
    with connect(guarded.server) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
        assert read_to_end(connection).startswith(b"HTTP/1.1 401 ")
    with connect(guarded.server) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nx-api-key: {FILE_KEY}\r\n\r\n"
        connection.sendall(head.encode())
        expected = b"200" if path in WATCHING and path != "/v1/models/any" else b"404"
        assert read_to_end(connection).split(b" ")[1] == expected


def test_health_and_readiness_are_open(guarded: Guarded) -> None:
    for path in ("/health", "/ready"):
        answer = guarded.client.get(path)
        assert answer.status_code == 200 and set(answer.json()) == {"status", "phase", "seconds_since_last_step"}


def test_a_request_without_a_key_has_its_line(guarded: Guarded) -> None:
    before = len(guarded.server.outcome_lines())
    guarded.client.post("/generate", json={"prompt": "x"})
    wait_for(lambda: len(guarded.server.outcome_lines()) > before, "the line of the refusal")
    (line,) = guarded.server.outcome_lines()[before:]
    assert (line["outcome"], line["reason"], line["status"]) == ("refused", "invalid_api_key", "401")


def test_keys_are_in_no_log(guarded: Guarded) -> None:
    guarded.client.post("/generate", json={"prompt": "x"}, headers=guarded.as_owner("guessed-key"))
    text = guarded.server.log.read_text()
    assert not any(key in text for key in (*KEYS, "guessed-key"))


def test_pages_are_not_shared_between_keys(guarded: Guarded) -> None:
    body = {"prompt": list(range(1000, 1100)), "max_tokens": 1, "temperature": 0}

    def cached(key: str) -> int:
        answer = guarded.client.post("/generate", json=body, headers=guarded.as_owner(key)).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(FIRST_KEY) == 0
    assert cached(FIRST_KEY) > 64
    assert cached(SECOND_KEY) == 0
    assert cached(SECOND_KEY) == cached(FIRST_KEY) > 64


def test_metrics_can_be_opened(tmp_path: Path) -> None:
    flags = ("--api-key", FLAG_KEY, "--open-metrics", "--allowed-origins", "https://chat.internal")
    with served(tmp_path / "server.log", *flags) as server:
        assert httpx.get(f"{server.url}/metrics", timeout=30).text.count("glint:") > 20
        assert httpx.get(f"{server.url}/stats", timeout=30).status_code == 401
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, expected in (("https://chat.internal", "https://chat.internal"), ("https://other", None)):
            asked = httpx.options(
                f"{server.url}/v1/chat/completions", headers=preflight | {"Origin": origin}, timeout=30
            )
            assert asked.headers.get("access-control-allow-origin") == expected
            answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": origin}, timeout=30)
            assert answer.status_code == 401
            assert answer.headers.get("access-control-allow-origin") == expected


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
    for size, expected in ((60_000, b"HTTP/1.1 200 "), (70_000, b"HTTP/1.1 400 "), (400_000, b"HTTP/1.1 400 ")):
        with connect(server) as connection:
            head = f"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\nX-Long: {'x' * size}\r\n\r\n"
            try:
                connection.sendall(head.encode())
            except (BrokenPipeError, ConnectionResetError):
                assert size > 65_536
            received = read_to_end(connection)
            assert received.startswith(expected) or (size > 65_536 and not received)


def test_requests_sent_without_waiting_are_all_answered(server: Served) -> None:
    """Many small requests in a row have more bytes than one header may have."""
    count = 2000
    one = b"GET /health HTTP/1.1\r\nHost: test\r\nX-Pad: " + b"y" * 40 + b"\r\n\r\n"
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
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n")
        try:
            for index in range(200_000):
                connection.sendall(b"X-%d: y\r\n" % index)
        except (BrokenPipeError, ConnectionResetError):
            return
        raise AssertionError("two hundred thousand headers were read")


def test_bodies_are_bounded(server: Served) -> None:
    limit = 4 * 2**20
    head = "POST /generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
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


def test_slow_and_half_open_clients_cost_nothing_to_others(server: Served) -> None:
    """Connections that send nothing, or headers a byte at a time, are closed; others are served meanwhile."""
    began = time.monotonic()
    slow = [connect(server, 30) for _ in range(40)]
    for connection in slow[1:]:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: te")
    dripping = threading.Thread(target=drip, args=(slow[1],))
    dripping.start()
    answer = httpx.post(f"{server.url}/generate", json={"prompt": "x", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
    for connection in slow:
        assert read_to_end(connection) == b""
        connection.close()
    assert 9 < time.monotonic() - began < 25
    dripping.join()


def drip(connection: socket.socket) -> None:
    """Send header bytes slowly until the server has had enough."""
    try:
        for _ in range(60):
            connection.sendall(b"x")
            time.sleep(0.5)
    except OSError:
        pass


def test_a_client_that_does_not_read_delays_nobody(server: Served) -> None:
    server.wait_idle()
    before = len(server.outcome_lines())
    body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 20}
    with connect(server) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(request_bytes("/generate", body))
        wait_for(lambda: server.stats()["requests_running"] == 1, "the deaf request runs")
        answer = httpx.post(f"{server.url}/generate", json={"prompt": "x", "max_tokens": 3}, timeout=60)
        assert answer.status_code == 200
    outcomes_since(server, before, 2)
    check_all_free(server)
