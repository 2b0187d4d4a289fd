"""A real server behind a real nginx: streams arrive as they are written, clients that leave are noticed."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from glint.server.limits import Limits
from glint.server.serve import KEEP_ALIVE_SECONDS
from tests.deploy.command_lines import seconds
from tests.deploy.proxied import CONFIGURATION, NGINX, PUBLIC_NAME, Proxied, proxied
from tests.e2e.raw_http import check_all_free, outcomes_since, read_until, request_bytes, wait_for
from tests.e2e.served import START_SECONDS, Served, free_port, served, start

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx (Debian: apt install nginx-light)")

TOKENS = 12
SLOW_FLAGS = ("--kernels", "plain", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
NAME_FLAGS = ("--allowed-hosts", PUBLIC_NAME)
SHORT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 1500}
LIMIT = Limits().body_bytes


@dataclass(frozen=True)
class Behind:
    """A slow server, the nginx in front of it, and what clients got while the server started."""

    server: Served
    proxy: Proxied
    early: frozenset[tuple[int, str | None, str]]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """One request at a time runs, one may wait, and a token takes a good part of a second."""
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    with proxied(folder / "proxy", port) as proxy:
        early = {ask_early(proxy)}
        server = start(folder / "server.log", *SLOW_FLAGS, *NAME_FLAGS, port=port, wait=False)
        try:
            deadline = time.monotonic() + START_SECONDS
            while (answer := ask_early(proxy))[0] == 503:
                assert server.process.poll() is None and time.monotonic() < deadline, server.log.read_text()
                early.add(answer)
            server.wait_ready()
            yield Behind(server, proxy, frozenset(early))
            assert server.stop() == 0
        finally:
            server.process.kill()
            server.process.wait()


def ask_early(proxy: Proxied) -> tuple[int, str | None, str]:
    """Status, time to wait and error code that a client gets now; a server that is there refuses the empty request."""
    with proxy.client() as client:
        answer = client.post("/generate", json={})
    return answer.status_code, answer.headers.get("retry-after"), answer.json()["error"]["code"]


def generated(server: Served) -> int:
    """How many tokens the server has written so far, by its own count."""
    count = server.stats()["generated_tokens"]
    assert isinstance(count, int)
    return count


def written_at_first_event(server: Served, proxy: Proxied) -> int:
    """How far the server was with an answer when its first event reached the client, in tokens."""
    server.wait_idle()
    before = generated(server)
    with proxy.client() as client, client.stream("POST", "/generate", json=SHORT | {"stream": True}) as answer:
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        first = next(events)
        written = generated(server) - before
        tokens = [token for event in (first, *events) for token in event.get("token_ids", [])]
    assert len(tokens) == TOKENS
    return written


def test_while_no_server_answers_clients_are_told_to_wait(behind: Behind) -> None:
    assert behind.early == {(503, "5", "not_ready"), (503, "1", "not_ready")}


def test_a_stream_is_passed_on_as_it_is_written(behind: Behind) -> None:
    assert 1 <= written_at_first_event(behind.server, behind.proxy) < TOKENS


def test_with_buffering_the_first_event_comes_with_the_last(behind: Behind, tmp_path: Path) -> None:
    shipped = CONFIGURATION.read_text()
    assert "proxy_buffering off;" in shipped
    text = shipped.replace("proxy_buffering off;", "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;")
    with proxied(tmp_path / "buffering", behind.server.port, text) as proxy:
        assert written_at_first_event(behind.server, proxy) == TOKENS


def test_the_openai_client_streams_through_the_proxy(behind: Behind) -> None:
    with behind.proxy.client() as transport:
        client = openai.OpenAI(base_url=f"{behind.proxy.url}/v1", api_key="none", max_retries=0, http_client=transport)
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": "Hello"}]
        chunks = list(client.chat.completions.create(model=model, messages=messages, max_tokens=2, stream=True))
    assert model == behind.server.model
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("length", "stop")


def test_the_public_name_is_one_that_the_server_was_given(behind: Behind, tmp_path: Path) -> None:
    with behind.proxy.client() as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models", headers={"Host": "other.internal"}).status_code == 403
    with (
        served(tmp_path / "server.log") as nameless,
        proxied(tmp_path / "proxy", nameless.port) as proxy,
        proxy.client() as client,
    ):
        refused = client.get("/v1/models")
        assert client.get("/ready").status_code == 200
    assert refused.status_code == 403
    assert f"--allowed-hosts {PUBLIC_NAME}" in refused.json()["error"]["message"]


def test_pages_under_the_public_name_are_told_from_others(behind: Behind) -> None:
    """A browser says https of its page while the server is asked over http."""
    with behind.proxy.client() as client:
        for origin, status in ((f"https://{PUBLIC_NAME}", 400), ("https://page.test", 403), ("null", 403)):
            assert client.post("/generate", json={}, headers={"Origin": origin}).status_code == status


@contextmanager
def asking(behind: Behind, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client that has sent a request through the proxy and leaves at the end of the block."""
    trusted = ssl.create_default_context(cafile=str(behind.proxy.certificate))
    with (
        socket.create_connection(("127.0.0.1", behind.proxy.port), 60) as plain,
        trusted.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(request_bytes("/generate", body, {"Host": PUBLIC_NAME}))
        yield connection


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_request(behind: Behind, streams: bool) -> None:
    behind.server.wait_idle()
    before = len(behind.server.outcome_lines())
    with asking(behind, LONG | {"stream": streams}) as connection:
        if streams:
            read_until(connection, b"data: ")
        wait_for(lambda: behind.server.stats()["requests_running"] == 1, "the request runs")
    (line,) = outcomes_since(behind.server, before, 1)
    assert line["outcome"] == "cancelled" and int(line["completion_tokens"]) < LONG["max_tokens"]
    check_all_free(behind.server)


def test_a_refusal_of_the_server_passes_unchanged(behind: Behind) -> None:
    server = behind.server
    server.wait_idle()
    before = len(server.outcome_lines())
    with asking(behind, LONG | {"stream": True}) as running:
        read_until(running, b"data: ")
        with asking(behind, LONG):
            wait_for(lambda: server.stats()["requests_waiting"] == 1, "the second request waits")
            with behind.proxy.client() as client:
                through = client.post("/generate", json=LONG)
            direct = httpx.post(f"{server.url}/generate", json=LONG, timeout=60)
    first, second = (re.sub(r"try again in \d+ s", "", answer.text) for answer in (through, direct))
    assert (through.status_code, first) == (direct.status_code, second)
    assert through.status_code == 429 and through.json()["error"]["code"] == "queue_full"
    assert 1 <= int(through.headers["retry-after"]) <= 60
    lines = outcomes_since(server, before, 4)
    assert sorted(line["outcome"] for line in lines) == ["cancelled", "cancelled", "refused", "refused"]
    assert through.headers["x-request-id"] in [line["request_id"] for line in lines]


def body_of_size(size: int) -> bytes:
    """A request with an unknown field that fills it up to this many bytes."""
    whole = json.dumps({"filling": ""}).encode()
    return whole.replace(b'""', b'"' + b"x" * (size - len(whole)) + b'"')


def test_bodies_are_bounded_where_the_server_bounds_them(behind: Behind) -> None:
    headers = {"Content-Type": "application/json"}
    before = len(behind.server.outcome_lines())
    with behind.proxy.client() as client:
        largest = client.post("/generate", content=body_of_size(LIMIT), headers=headers)
        larger = client.post("/generate", content=body_of_size(LIMIT + 1), headers=headers)
    direct = httpx.post(f"{behind.server.url}/generate", content=body_of_size(LIMIT + 1), headers=headers, timeout=60)
    assert largest.status_code == 400 and "filling" in largest.json()["error"]["message"]
    assert larger.status_code == direct.status_code == 413
    assert larger.headers["content-type"] == "application/json" and "x-request-id" not in larger.headers
    assert larger.json()["error"] == direct.json()["error"]
    outcomes_since(behind.server, before, 2)


def test_the_server_is_told_who_asks_and_keeps_its_connections(tmp_path: Path) -> None:
    """Two requests reach a listener over one connection of HTTP/1.1, with the client's address and scheme."""
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                for _ in range(3):
                    received.append(read_until(connection, b"\r\n\r\n").decode())
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=answer)
        thread.start()
        with proxied(tmp_path / "proxy", port) as proxy, proxy.client() as client:
            for _ in range(2):
                assert client.get("/v1/models").json() == {}
        thread.join(60)
    first, *later = received
    assert first.startswith("GET /health HTTP/1.1\r\n")
    for request in later:
        head = dict(line.split(": ", 1) for line in request.lower().splitlines()[1:] if line)
        assert request.startswith("GET /v1/models HTTP/1.1\r\n")
        assert (head["host"], head["x-forwarded-for"], head["x-forwarded-proto"]) == (
            PUBLIC_NAME,
            "127.0.0.1",
            "https",
        )
        assert "connection" not in head


def test_a_server_that_is_down_is_passed_over(behind: Behind, tmp_path: Path) -> None:
    shipped = CONFIGURATION.read_text()
    one = "server 127.0.0.1:8000;"
    text = shipped.replace(one, f"server 127.0.0.1:{free_port()}; {one}")
    with proxied(tmp_path / "two", behind.server.port, text) as proxy:
        assert {ask_early(proxy)[0] for _ in range(4)} == {400}


def setting(name: str) -> str:
    """The one value of a setting in the shipped configuration."""
    (value,) = re.findall(rf"^\s*{name} ([^;]+);", CONFIGURATION.read_text(), re.MULTILINE)
    return str(value)


def test_sizes_and_times_follow_the_server() -> None:
    assert int(setting("client_max_body_size").removesuffix("m")) * 2**20 == LIMIT
    assert str(LIMIT) in CONFIGURATION.read_text()
    assert seconds(setting("client_body_timeout")) == Limits().body_seconds
    assert seconds(setting("proxy_read_timeout")) > Limits().max_deadline_seconds
    assert seconds(setting("keepalive_timeout")) < KEEP_ALIVE_SECONDS


def test_nginx_has_nothing_to_remark(tmp_path: Path) -> None:
    with proxied(tmp_path / "proxy", free_port()) as proxy:
        folder = proxy.certificate.parent
        command = [str(NGINX), "-t", "-c", str(folder / "nginx.conf")]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "warn" not in ended.stderr, ended.stderr
