"""The end of a server while requests are open, and its log, of which every line is an object with --log-json."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.raw_http import connect, read_to_end, read_until, request_bytes, wait_for
from tests.e2e.served import Served, start
from tests.e2e.small_glm import write_small_glm

LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 1900, "ignore_eos": True}
UNREAD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 1900,
    "ignore_eos": True,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}
END_SECONDS = 60.0
CHOICES = 16
DEFECT = """
import sys, warnings
from glint.server import serve
def fail(settings, link=None):
    warnings.warn("one of a library")
    print("two\\nlines", file=sys.stderr)
    raise ValueError("a defect")
serve.serve = fail
from glint.cli import main
sys.exit(main(sys.argv[1:]))
"""
MODES = pytest.mark.parametrize("flags", [(), ("--no-restart",)], ids=["supervised", "alone"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return write_small_glm(tmp_path_factory.mktemp("ending") / "model")


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[Served]:
    """A server that is ready, gone at the end of the block."""
    server = start(log, *flags)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def open_requests(server: Served, held: ExitStack) -> tuple[socket.socket, socket.socket, socket.socket]:
    """A stream, an answer that is waited for, a body that does not come, and beside them a stream that nobody reads.

    The first two have many choices, so that they are not done before the end comes.
    """
    streaming, whole, body, unread = (held.enter_context(connect(server, END_SECONDS)) for _ in range(4))
    streaming.sendall(request_bytes("/generate", LONG | {"stream": True, "n": CHOICES}))
    read_until(streaming, b"data: ")
    whole.sendall(request_bytes("/generate", LONG | {"n": CHOICES}))
    body.sendall(request_bytes("/generate", LONG)[:-5])
    unread.sendall(request_bytes("/v1/chat/completions", UNREAD))
    wait_for(lambda: server.stats()["requests_running"] == 2 * CHOICES + 1, "all requests run")
    return streaming, whole, body


@MODES
@pytest.mark.parametrize("has_second_signal", [False, True], ids=["time", "signal"])
def test_open_requests_are_told_of_the_end(
    tmp_path: Path, model: Path, flags: tuple[str, ...], has_second_signal: bool
) -> None:
    timeout = "60" if has_second_signal else "1"
    with (
        serving(tmp_path / "server.log", str(model), "--shutdown-timeout", timeout, *flags) as server,
        ExitStack() as held,
    ):
        streaming, whole, body = open_requests(server, held)
        server.process.send_signal(signal.SIGTERM)
        if has_second_signal:
            wait_for(lambda: "draining, up to 60 s" in server.log.read_text(), "the server drains")
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert b'"code":"shutting_down"' in read_to_end(streaming)
        for waiting in (whole, body):
            answer = read_to_end(waiting)
            assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in answer
        lines = server.outcome_lines()
        assert [(line["outcome"], line["reason"]) for line in lines] == [("cancelled", "shutting_down")] * 4
        assert len({line["request_id"] for line in lines}) == 4
        text = server.log.read_text()
        assert "Traceback" not in text and "ASGI" not in text


def objects(log: Path) -> list[dict[str, Any]]:
    """The lines of a log, each of which must be one JSON object with a time, a level and a logger."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    for line in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["level"] in ("info", "warning", "error", "critical") and line["logger"]
    return found


@MODES
def test_every_line_of_a_json_log_is_an_object(tmp_path: Path, model: Path, flags: tuple[str, ...]) -> None:
    log = tmp_path / "server.log"
    with serving(log, str(model), "--host", "0.0.0.0", "--shutdown-timeout", "1", "--log-json", *flags) as server:
        answer = httpx.post(f"{server.url}/generate", json=LONG | {"max_tokens": 2}, timeout=30)
        lost = None
        with connect(server, END_SECONDS) as stream:
            stream.sendall(request_bytes("/generate", LONG | {"stream": True}))
            head = read_until(stream, b"data: ").decode()
            if not flags:
                (lost,) = re.findall(r"x-request-id: (\S+)", head)
                os.kill(server.engine_pid(), signal.SIGKILL)
                wait_for(lambda: "ready again" in log.read_text(), "the server is ready again")
            assert server.stop() == 0
        lines = objects(log)
        by_id = {line["request_id"]: line for line in lines if line["logger"] == "glint.requests"}
        ended = by_id[answer.headers["x-request-id"]]
        assert (ended["outcome"], ended["completion_tokens"], ended["level"]) == ("length", 2, "info")
        assert isinstance(ended["total_seconds"], float) and len(by_id) == 2
        if lost is not None:
            assert (by_id[lost]["outcome"], by_id[lost]["level"]) == ("lost", "error")
        messages = [line["message"] for line in lines if "message" in line]
        for part in ("without an API key", "start-up:\n  python and imports", "ready: "):
            assert any(part in message for message in messages), part


@MODES
@pytest.mark.parametrize("wrong", [("/nothing/here",), ("--port", "70000")], ids=["model", "port"])
def test_a_refusal_is_one_object(tmp_path: Path, flags: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    server = start(tmp_path / "server.log", *wrong, "--log-json", *flags, wait=False)
    assert server.process.wait(END_SECONDS) == 1
    *_, last = objects(server.log)
    assert last["level"] == "error" and wrong[-1] in last["message"]


def test_what_python_prints_by_itself_is_an_object(tmp_path: Path, model: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        command = [sys.executable, "-c", DEFECT, "serve", str(model), "--log-json"]
        assert subprocess.run(command, stderr=output, timeout=END_SECONDS, check=False).returncode == 1
    warning, printed, defect = objects(log)
    assert "one of a library" in warning["message"] and warning["logger"] == "py.warnings"
    assert printed["message"] == "two\nlines"
    assert "a defect" in defect["message"] and defect["traceback"].startswith("Traceback (most recent call last):\n")


@MODES
def test_a_signal_while_it_loads_removes_the_socket(tmp_path: Path, model: Path, flags: tuple[str, ...]) -> None:
    path = tmp_path / "socket"
    server = start(tmp_path / "log", str(model), "--uds", str(path), *flags, wait=False)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://model") as client:
            wait_for(path.exists, "the server listens")
            assert client.get("/health", timeout=END_SECONDS).json()["phase"] in ("loading", "warming")
        assert server.stop() == 0
        assert "nothing is served yet, the process ends" in server.log.read_text()
        assert not path.exists()
    finally:
        server.process.kill()
        server.process.wait()
