"""The life of a server process: loading, ready, draining, killed, and requests whose client or time is gone."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from tests.e2e.served import ROOT, Served, free_port, served, start

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that runs one request at a time and reads prompts in small chunks."""
    flags = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    with served(tmp_path_factory.mktemp("narrow") / "server.log", *flags) as running:
        yield running


def stop(server: Served) -> None:
    """End a server that a test has left running."""
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def phase_of(server: Served, path: str) -> tuple[int, str]:
    """The status and the phase that a watching route answers with."""
    answer = httpx.get(f"{server.url}{path}", timeout=30)
    return answer.status_code, answer.json()["phase"]


def test_health_and_readiness_while_loading_and_after(tmp_path: Path) -> None:
    server = start(tmp_path / "server.log", wait=False)
    try:
        seen = set()
        answers = set()
        while ("/ready", 200, "ready") not in seen:
            assert server.process.poll() is None, server.log.read_text()
            try:
                for path in ("/health", "/ready"):
                    seen.add((path, *phase_of(server, path)))
                answer = httpx.post(f"{server.url}/generate", json=LONG | {"max_tokens": 1}, timeout=30)
                answers.add((answer.status_code, answer.headers.get("retry-after")))
            except httpx.TransportError:
                time.sleep(0.01)
        assert ("/health", 200, "loading") in seen and ("/ready", 503, "loading") in seen
        assert {(503, "1")} <= answers <= {(503, "1"), (200, None)}
        assert not {entry for entry in seen if entry[0] == "/health" and entry[1] != 200}
        check_table(server.log.read_text())
        assert phase_of(server, "/health") == (200, "ready")
    finally:
        stop(server)


def check_table(text: str) -> None:
    """The phases of the start-up table add up to its last row."""
    rows = re.findall(r"^  (\S.*?) +(\d+\.\d\d) s$", text, re.MULTILINE)
    assert rows[-1][0] == "all" and len(rows) > 4
    assert sum(float(seconds) for _, seconds in rows[:-1]) == pytest.approx(float(rows[-1][1]), abs=0.005 * len(rows))


def test_the_first_signal_drains(tmp_path: Path) -> None:
    server = start(tmp_path / "server.log")
    try:
        with connect(server, 120) as connection, connect(server) as idle:
            body = LONG | {"max_tokens": 60, "stream": True}
            connection.sendall(request_bytes("/generate", body))
            received = read_until(connection, b"data: ")
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_refused(server), "new connections are refused")
            assert idle.recv(1) == b""
            received += read_to_end(connection)
        events = re.findall(rb"data: (\{.*\})", received)
        tokens = [token for event in events for token in json.loads(event).get("token_ids", [])]
        assert len(tokens) == 60 and b"usage" in events[-1]
        assert server.process.wait(30) == 0
        (line,) = server.outcome_lines()
        assert (line["outcome"], line["completion_tokens"]) == ("length", "60")
        assert "Traceback" not in server.log.read_text()
    finally:
        stop(server)


def is_refused(server: Served) -> bool:
    """Whether nobody listens any more; until then a server that drains is not ready."""
    try:
        answer = httpx.get(f"{server.url}/ready", timeout=30)
    except httpx.TransportError:
        return True
    assert (answer.status_code, answer.json()["phase"]) in ((503, "draining"), (200, "ready"))
    return False


def test_the_second_signal_stops_at_once(tmp_path: Path) -> None:
    server = start(tmp_path / "server.log")
    try:
        with connect(server, 60) as streaming, connect(server, 60) as waiting:
            streaming.sendall(request_bytes("/generate", LONG | {"stream": True}))
            read_until(streaming, b"data: ")
            waiting.sendall(request_bytes("/generate", LONG))
            wait_for(lambda: server.stats()["requests_running"] == 2, "both requests run")
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_refused(server), "new connections are refused")
            assert server.process.poll() is None
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            assert time.monotonic() - began < 5
        assert [line["outcome"] for line in server.outcome_lines()] == ["cancelled", "cancelled"]
        assert "Traceback" not in server.log.read_text()
    finally:
        stop(server)


def test_a_drain_ends_when_its_time_is_up(tmp_path: Path) -> None:
    server = start(tmp_path / "server.log", "--shutdown-timeout", "1")
    try:
        with connect(server, 60) as connection:
            connection.sendall(request_bytes("/generate", LONG | {"stream": True}))
            read_until(connection, b"data: ")
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 10
        (line,) = server.outcome_lines()
        assert (line["outcome"], line["reason"]) == ("cancelled", "shutting_down")
    finally:
        stop(server)


def test_killed_under_load_and_started_again(tmp_path: Path) -> None:
    server = start(tmp_path / "server.log")
    endings: list[str] = []

    def load() -> None:
        try:
            endings.append(f"status {httpx.post(f'{server.url}/generate', json=LONG, timeout=60).status_code}")
        except httpx.TransportError as problem:
            endings.append(type(problem).__name__)

    clients = [threading.Thread(target=load) for _ in range(8)]
    try:
        for client in clients:
            client.start()
        wait_for(lambda: server.stats()["requests_running"] == 8, "all requests run")
        server.process.kill()
        server.process.wait()
        for client in clients:
            client.join(30)
        assert len(endings) == 8 and not any(ending.startswith("status") for ending in endings)
        again = start(tmp_path / "again.log", port=server.port)
        try:
            answer = httpx.post(f"{again.url}/generate", json=LONG | {"max_tokens": 2}, timeout=60)
            assert len(answer.json()["choices"][0]["token_ids"]) == 2
            assert again.stop() == 0
        finally:
            stop(again)
    finally:
        stop(server)


def test_a_port_in_use_is_a_clear_error(narrow: Served) -> None:
    command = [sys.executable, "-m", "glint", "serve", "--port", str(narrow.port)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(f"glint: cannot listen on 127.0.0.1 port {narrow.port}: ") and "--port" in last
    assert "Traceback" not in ended.stderr


def test_a_folder_that_cannot_be_served_is_a_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "glint", "serve", str(tmp_path / "nothing"), "--port", str(free_port())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert str(tmp_path / "nothing") in ended.stderr


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["body", "queue", "prefill", "decode"])
def test_a_client_that_leaves_cancels(narrow: Served, stage: str, stream: bool) -> None:
    narrow.wait_idle()
    before = len(narrow.outcome_lines())
    blocker = connect(narrow)
    leaver = connect(narrow)
    if stage == "queue":
        blocker.sendall(request_bytes("/generate", LONG | {"stream": True}))
        read_until(blocker, b"data: ")
    leave(narrow, leaver, stage, stream)
    expected = 2 if stage == "queue" else 1
    if stage == "queue":
        wait_for(lambda: len(narrow.outcome_lines()) == before + 1, "the one that waited is gone")
        assert narrow.stats()["requests_running"] == 1
        line = narrow.outcome_lines()[-1]
        assert line["completion_tokens"] == "0" and line["queue_seconds"] == "-"
    blocker.close()
    lines = outcomes_since(narrow, before, expected)
    assert {(line["outcome"], line["reason"]) for line in lines} == {("cancelled", "client_left")}
    if stage == "prefill":
        assert lines[0]["completion_tokens"] == "0" and lines[0]["queue_seconds"] != "-"
    if stage == "decode":
        assert 0 < int(lines[0]["completion_tokens"]) < 1500
    check_all_free(narrow)


def leave(server: Served, leaver: socket.socket, stage: str, stream: bool) -> None:
    """Send a request and close the connection once it has come to the stage."""
    body = LONG | {"stream": stream}
    if stage == "prefill":
        body["prompt"] = list(range(20, 3020))
    sent = request_bytes("/generate", body)
    steps = server.stats()["steps"]
    assert isinstance(steps, int)
    if stage == "body":
        leaver.sendall(sent[:-5])
        time.sleep(0.2)
    else:
        leaver.sendall(sent)
    if stage == "queue":
        wait_for(lambda: server.stats()["requests_waiting"] == 1, "the request waits")
    elif stage in ("prefill", "decode"):
        fewest = 2 if stage == "prefill" else 6
        wait_for(lambda: int(str(server.stats()["steps"])) >= steps + fewest, "some steps have run")
    leaver.close()


def test_a_reset_counts_as_leaving(narrow: Served) -> None:
    narrow.wait_idle()
    before = len(narrow.outcome_lines())
    with connect(narrow) as connection:
        connection.sendall(request_bytes("/generate", LONG | {"stream": True}))
        read_until(connection, b"data: ")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    (line,) = outcomes_since(narrow, before, 1)
    assert (line["outcome"], line["reason"]) == ("cancelled", "client_left")
