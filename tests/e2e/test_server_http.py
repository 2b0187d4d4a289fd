"""HTTP by hand against a real server: floods, clients that leave, old clients, and those that ask for an upgrade."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from statistics import median

import httpx
import pytest

from tests.e2e.raw_http import check_all_free, connect, outcomes_since, read_to_end, read_until, request_bytes
from tests.e2e.served import Served

MEGABYTE = 2**20
FLOOD_BYTES = 60 * MEGABYTE
ALLOWED_GROWTH_BYTES = 5 * MEGABYTE
CLOSE_SECONDS = 20.0
HEALTH_SECONDS = 0.5
SLOWEST_SECONDS = 5.0
GENERATE = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
LONG_NAME = "requests behind one that takes long"
PAGES_BYTES = 24 * 2**20
LONG = GENERATE | {"max_tokens": 1500}
H2C = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA"}
CHUNKED = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
FLOODS = {
    "trailers": (CHUNKED + b"0\r\n", b"a:b\r\n" * 10_000),
    "long trailers": (CHUNKED + b"0\r\n", b"a: " + b"b" * 50_000 + b"\r\n"),
    "chunk extensions": (CHUNKED, b"1" + b";a=b" * 10_000 + b"\r\nx\r\n"),
    "one extension": (CHUNKED + b"1;", b"a" * 50_000),
    "small chunks": (CHUNKED, b"1\r\nx\r\n" * 10_000),
    "a body": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000000\r\n\r\n", b"x" * 50_000),
    "empty lines": (b"", b"\r\n" * 25_000),
    "a target": (b"GET /", b"x" * 50_000),
    "headers": (b"GET /health HTTP/1.1\r\n", b"a:b\r\n" * 10_000),
    "trailers of a route": (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        b"a:b\r\n" * 10_000,
    ),
    LONG_NAME: (request_bytes("/generate", LONG), CHUNKED * 1_000),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_costs_no_memory_and_is_cut_off(server: Served, name: str) -> None:
    """A request that runs meanwhile touches pages of its own for the first time.

    The median of the times that others wait is judged strictly, the slowest loosely: the machine has other work too.
    """
    begin, piece = FLOODS[name]
    server.wait_idle()
    memory_before, began = server.memory_bytes(), time.monotonic()
    waits: list[float] = []
    with connect(server, CLOSE_SECONDS) as connection, httpx.Client(base_url=server.url) as other:
        connection.sendall(begin)
        sent = 0
        with suppress(ConnectionResetError, BrokenPipeError):
            while True:
                sent += connection.send(piece)
                assert sent < FLOOD_BYTES and time.monotonic() - began < CLOSE_SECONDS, "all of it was read"
                if not waits or sent % MEGABYTE < len(piece):
                    asked = time.monotonic()
                    assert other.get("/health", timeout=30).status_code == 200
                    waits.append(time.monotonic() - asked)
    pages = PAGES_BYTES if LONG_NAME == name else 0
    assert server.memory_bytes() - memory_before < ALLOWED_GROWTH_BYTES + pages
    assert median(waits) < HEALTH_SECONDS and max(waits) < SLOWEST_SECONDS
    check_all_free(server)


def test_a_body_that_nobody_reads_and_that_trickles_ends_the_connection(server: Served) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        answer = read_until(connection, b"seconds_since_last_step")
        assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close\r\n" in answer
        began = time.monotonic()
        with suppress(ConnectionResetError, BrokenPipeError):
            while True:
                connection.sendall(b"x")
                assert time.monotonic() - began < CLOSE_SECONDS
                time.sleep(0.05)


BEHIND = {
    "nothing": b"",
    "a head": b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
    "a request": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a request": request_bytes("/generate", LONG)[:-5],
    "a long request": request_bytes("/generate", LONG),
    "garbage": b"\0\1\2 garbage\r\n\r\n",
    "many requests": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000,
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", BEHIND)
def test_a_client_that_leaves_ends_its_request_whatever_it_sent_behind_it(
    server: Served, name: str, streams: bool
) -> None:
    server.wait_idle()
    before, log_before = server.count_outcomes(), len(server.log.read_text())
    with connect(server) as connection:
        connection.sendall(request_bytes("/generate", LONG | {"stream": streams}))
        connection.setblocking(False)
        with suppress(BlockingIOError):
            connection.send(BEHIND[name])
        while server.stats()["requests_running"] == 0:
            time.sleep(0.02)
    (line,) = outcomes_since(server, before, 1)
    assert (line["outcome"], line["reason"]) == ("cancelled", "client_left")
    assert int(line["completion_tokens"]) < LONG["max_tokens"]
    assert "Traceback" not in server.log.read_text()[log_before:]
    check_all_free(server)


def test_a_valid_request_before_garbage_is_answered_whole(server: Served) -> None:
    server.wait_idle()
    before, log_before = server.count_outcomes(), len(server.log.read_text())
    with connect(server) as connection:
        connection.sendall(request_bytes("/generate", GENERATE) + b"\0\1\2 garbage\r\n\r\n")
        answer, _, refusal = read_to_end(connection).partition(b"HTTP/1.1 400 ")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["token_ids"]) == GENERATE["max_tokens"]
    assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    (line,) = outcomes_since(server, before, 1)
    assert line["outcome"] == "length"
    assert not {"Traceback", "WARNING", "ERROR"} & set(server.log.read_text()[log_before:].split())


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1"),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", "HTTP/1.1"),
        (b"BREW /pot HTTP/1.1\r\n\r\n", "method"),
        (b"CONNECT test:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", "CONNECT"),
        (b"GET /health HTTP/1.1\r\nHost test\r\n\r\n", "header"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "Transfer-Encoding"),
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "chunk"),
    ],
)
def test_what_is_not_http_is_told_why(server: Served, sent: bytes, words: str) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_http" and words in error["message"]


def tokens_of(answer: bytes) -> list[int]:
    """The tokens of an answer, which must be whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    return list(json.loads(body)["choices"][0]["token_ids"])


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("pause_after", ["nothing", "head", "half the body"])
def test_a_request_that_offers_http2_keeps_its_body(server: Served, pause_after: str, is_chunked: bool) -> None:
    """As the HTTP client of Java sends it on http://, where its body may come in a later segment."""
    expected = httpx.post(f"{server.url}/generate", json=GENERATE, timeout=60).json()["choices"][0]["token_ids"]
    head, _, body = request_bytes("/generate", GENERATE, H2C).partition(b"\r\n\r\n")
    if is_chunked:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    whole = head + b"\r\n\r\n" + body
    cut = {"nothing": len(whole), "head": len(head) + 4, "half the body": len(whole) - 20}[pause_after]
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            connection.sendall(whole[:cut])
            time.sleep(0.1)
            connection.sendall(whole[cut:])
            assert tokens_of(read_until(connection, b"}}")) == expected


def test_a_client_of_http_1_0_gets_no_chunks(server: Served) -> None:
    plain = request_bytes("/generate", GENERATE).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with connect(server) as connection:
        connection.sendall(plain)
        whole = read_to_end(connection)
    assert b"connection: close\r\n" in whole and b"transfer-encoding" not in whole
    kept = request_bytes("/generate", GENERATE, {"Connection": "keep-alive"}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(kept)
            answer = read_until(connection, b"}}")
            assert b"connection: keep-alive\r\n" in answer and tokens_of(answer) == tokens_of(whole)


@pytest.mark.parametrize("connection_header", ["keep-alive", "close"])
def test_a_stream_to_a_client_of_http_1_0_ends_with_the_connection(server: Served, connection_header: str) -> None:
    body = {"prompt": "Once", "max_tokens": 20, "ignore_eos": True, "temperature": 0, "stream": True}
    request = request_bytes("/v1/completions", body | {"model": server.model}, {"Connection": connection_header})
    with connect(server) as connection:
        connection.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, old = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"content-length" not in head and b"connection: close" in head
    assert old.endswith(b"data: [DONE]\n\n")
    new = httpx.post(f"{server.url}/v1/completions", json=body | {"model": server.model}, timeout=60).text
    assert "".join(texts_of(old.decode())) == "".join(texts_of(new)) != ""


def texts_of(stream: str) -> list[str]:
    """The texts of the events of a stream, every line of which must be an event or empty."""
    assert all(line.startswith("data: ") for line in stream.splitlines() if line)
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return [event["choices"][0]["text"] for event in events if event["choices"]]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_client_that_splits_lines_at_any_line_end_reads_a_stream(server: Served, path: str) -> None:
    text = "a\u2028b\u2029c\u0085d"
    body = {"prompt": "Once", "max_tokens": 30, "stream": True, "structured_outputs": {"choice": [text]}}
    named = body | ({"model": server.model} if path.startswith("/v1") else {})
    with httpx.stream("POST", f"{server.url}{path}", json=named, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line and line != "data: [DONE]"]
    parts = [event["choices"][0]["text"] if path.startswith("/v1") else event.get("text", "") for event in events]
    assert "".join(parts) == text
