"""A server that is restarted: what clients, watchers and the log see when its engine dies, stalls or is told to end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.raw_http import connect, outcome_of, read_to_end, read_until, request_bytes, wait_for
from tests.e2e.served import ROOT, Served, free_port, start
from tests.e2e.small_glm import write_small_glm

TEST_LIBRARY = os.environ.get("GLINT_TEST_LIBRARY") or str(ROOT / "build" / "libglint_cpu_test.so")
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 1900, "ignore_eos": True, "stream": True}
SHORT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
NUM_STREAMS = 6
END_SECONDS = 120.0
FAULT_AT_FIRST_LOAD = """
import os, sys
from pathlib import Path
if "GLINT_SUPERVISOR" in os.environ and not Path(os.environ["MARK"]).exists():
    Path(os.environ["MARK"]).touch()
    os.environ["GLINT_FAULT"] = "load:1:1"
from glint.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return write_small_glm(tmp_path_factory.mktemp("supervised") / "model")


@contextmanager
def serving(log: Path, *flags: str, **environment: str) -> Iterator[Served]:
    """A server that is ready, gone at the end of the block."""
    server = start(log, *flags, environment=environment)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@dataclass
class Load:
    """Short requests, one after the other, each on a connection of its own; refused connections are errors.

    `began_at` has the time at which each answered request was sent.
    """

    url: str
    statuses: Counter[int] = field(default_factory=Counter)
    retries: set[str | None] = field(default_factory=set)
    began_at: dict[str, float] = field(default_factory=dict)
    broken_at: list[tuple[float, float]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send until told to stop."""
        while not self.is_over.is_set():
            began = time.monotonic()
            try:
                answer = httpx.post(f"{self.url}/generate", json=SHORT, timeout=30)
            except httpx.TransportError as problem:
                assert not isinstance(problem, httpx.ConnectError), problem
                self.broken_at.append((began, time.monotonic()))
                continue
            self.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                self.began_at[answer.headers["x-request-id"]] = began
            else:
                self.retries.add(answer.headers.get("retry-after"))
                assert answer.json()["error"]["code"] == "engine_failed"
                assert "SIGKILL" in answer.json()["error"]["message"]


def open_streams(server: Served, count: int) -> tuple[list[socket.socket], set[str]]:
    """Streams that have brought their first tokens, and the ids of their requests."""
    streams, ids = [], set()
    for _ in range(count):
        stream = connect(server, END_SECONDS)
        stream.sendall(request_bytes("/generate", LONG))
        head = read_until(stream, b"data: ").decode()
        ids |= set(re.findall(r"x-request-id: (\S+)", head))
        streams.append(stream)
    assert len(ids) == count
    return streams, ids


def wait_restarted(server: Served, restarts: int) -> None:
    """Wait until the server is ready for another time."""

    def is_ready() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        answer = httpx.get(f"{server.url}/ready", timeout=30)
        return answer.status_code == 200 and answer.json()["restarts"] == restarts

    wait_for(is_ready, f"restart {restarts}", END_SECONDS)


def lines_by_id(server: Served) -> dict[str, list[str]]:
    """The outcomes that the log has for each request."""
    outcomes: dict[str, list[str]] = {}
    for line in server.outcome_lines():
        outcomes.setdefault(line["request_id"], []).append(line["outcome"])
    return outcomes


def test_killed_under_load(tmp_path: Path, model: Path) -> None:
    """Streams break and are logged as lost, later requests are told to try again, and no request has two outcomes.

    A server that dies between the last byte of an answer and its outcome leaves a request that is both answered and
    lost: of the short requests only the last one sent before the end can be that one.
    """
    with serving(tmp_path / "server.log", str(model)) as server, ThreadPoolExecutor(1) as threads:
        load = Load(server.url)
        loading = threads.submit(load.run)
        try:
            wait_for(lambda: load.statuses[200] > 3, "short requests are answered")
            streams, ids = open_streams(server, NUM_STREAMS)
            killed = server.engine_pid()
            killed_at = time.monotonic()
            os.kill(killed, signal.SIGKILL)
            for stream in streams:
                assert b"usage" not in read_to_end(stream)
                stream.close()
            before = load.statuses[200]
            wait_restarted(server, 1)
            wait_for(lambda: load.statuses[200] > before + 3, "short requests are answered again")
        finally:
            load.is_over.set()
        loading.result(END_SECONDS)
        assert set(load.statuses) == {200, 503} and load.retries <= {str(n) for n in range(1, 61)}
        assert all(began < killed_at < ended for began, ended in load.broken_at) and len(load.broken_at) <= 1
        wait_for(lambda: load.began_at.keys() <= lines_by_id(server).keys(), "the outcome of the last answer is logged")
        outcomes = lines_by_id(server)
        lost = {request_id for request_id, kinds in outcomes.items() if kinds == ["lost"]}
        last = max((began, request_id) for request_id, began in load.began_at.items() if began < killed_at)[1]
        answered = lost & set(load.began_at)
        assert ids <= lost and answered <= {last} and len(lost - ids - answered) <= len(load.broken_at)
        assert all(len(kinds) == 1 for kinds in outcomes.values())
        assert {request_id: ["length"] for request_id in load.began_at if request_id not in lost} == {
            request_id: kinds for request_id, kinds in outcomes.items() if request_id not in lost
        }
        assert outcome_of(server, min(ids))["reason"] == "SIGKILL"
        assert server.engine_pid() != killed
        stats: Any = server.stats()
        assert stats["restarts"] == 1 and stats["requests_by_outcome"]["lost"] == len(lost)
        assert "glint:restarts_total" in httpx.get(f"{server.url}/metrics", timeout=30).text
        text = server.log.read_text()
        assert f"was killed by SIGKILL; requests lost: {len(lost)}; it starts again now, restart 1 of at most 5" in text
        assert re.search(r"ready again \d+\.\d s after the failure, restart 1", text)
        assert server.stop() == 0


def test_nobody_is_refused_a_connection_across_a_restart(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "server.log", str(model)) as server:
        phases = ["ready"]
        while len(phases) < 200 or phases[-1] != "ready":
            if len(phases) == 20:
                os.kill(server.engine_pid(), signal.SIGABRT)
            answer = httpx.get(f"{server.url}/health", timeout=30)
            assert answer.status_code == 200
            phases.append(answer.json()["phase"])
            time.sleep(0.03)
        wait_restarted(server, 1)
        assert [phase for phase, later in zip(phases, [*phases[1:], None], strict=True) if phase != later] == [
            "ready",
            "restarting",
            "ready",
        ]
        assert "the server process was killed by SIGABRT" in server.log.read_text()


def test_what_waits_at_the_supervisor_is_answered_after_the_hand_over(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "server.log", str(model)) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: httpx.get(f"{server.url}/ready", timeout=30).status_code == 503, "the server restarts")
        with connect(server) as early, connect(server) as large:
            large.sendall(request_bytes("/v1/chat/completions", {"messages": [], "user": "x" * 5_000_000}))
            answer = read_to_end(large)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"engine_failed" in answer and b"retry-after: " in answer
            early.sendall(b"GET /v1/models HTTP/1.1\r\n")
            wait_restarted(server, 1)
            early.sendall(b"Host: test\r\n\r\n")
            assert read_to_end(early).startswith(b"HTTP/1.1 503 ")
        assert server.model == model.name


def test_a_rank_that_fails_is_started_anew(tmp_path: Path, model: Path) -> None:
    flags = (str(model), "--tp", "2", "--engine", TEST_LIBRARY)
    with serving(tmp_path / "server.log", *flags, GLINT_FAULT="step:1:60") as server:
        for restarts in (1, 2):
            streams, ids = open_streams(server, 2)
            for stream in streams:
                received = read_to_end(stream)
                assert b'"code":"engine_failed"' in received and b"rank 1 of 2 failed" in received
                stream.close()
            wait_restarted(server, restarts)
            assert {kind for request_id in ids for kind in lines_by_id(server)[request_id]} == {"failed"}
            assert httpx.post(f"{server.url}/generate", json=SHORT, timeout=30).status_code == 200
        text = server.log.read_text()
        assert "rank 1 of 2 failed" in text and text.count("it starts again now") == 2
        assert "outcome=lost" not in text and "Traceback" not in text


def test_a_process_that_hangs_is_killed_and_started_anew(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "server.log", str(model), "--health-timeout", "3") as server:
        streams, ids = open_streams(server, 1)
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert b"usage" not in read_to_end(streams[0])
        streams[0].close()
        wait_restarted(server, 1)
        assert lines_by_id(server) == {request_id: ["lost"] for request_id in ids}
        assert "longer than --health-timeout allows; the server process was killed by SIGKILL" in server.log.read_text()


def test_a_supervisor_that_was_stopped_with_its_server_goes_on(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "server.log", str(model), "--health-timeout", "2") as server:
        both = (server.process.pid, server.engine_pid())
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        for pid in both:
            os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        assert httpx.post(f"{server.url}/generate", json=SHORT, timeout=30).status_code == 200
        assert server.stats()["restarts"] == 0


def test_a_fault_at_the_first_load_is_tried_again(tmp_path: Path, model: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    flags = (str(model), "--port", str(port), "--tp", "2", "--engine", TEST_LIBRARY)
    with log.open("wb") as output:
        environment = os.environ | {"MARK": str(tmp_path / "mark")}
        process = subprocess.Popen(
            [sys.executable, "-c", FAULT_AT_FIRST_LOAD, "serve", *flags], cwd=ROOT, stderr=output, env=environment
        )
    server = Served(process, port, log)
    try:
        wait_for(lambda: "it starts again now" in log.read_text(), "the first start fails")
        wait_restarted(server, 1)
        assert "the start failed: glint_init_engine: rank 1 of 2 failed" in log.read_text()
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()


def test_restarts_have_a_limit_and_a_pause_ends_with_a_signal(tmp_path: Path, model: Path) -> None:
    """The warm-up of every start fails: after the restarts that are allowed the process ends, or at a signal before."""
    flags = (str(model), "--tp", "2", "--engine", TEST_LIBRARY)
    fault = {"GLINT_FAULT": "step:1:1"}
    server = start(tmp_path / "limit.log", *flags, "--max-restarts", "3", environment=fault, wait=False)
    assert server.process.wait(END_SECONDS) == 1
    text = server.log.read_text()
    assert re.findall(r"it starts again (.*), restart (\d) of at most 3 in a row", text) == [
        ("now", "1"),
        ("now", "2"),
        ("in 1 s", "3"),
    ]
    assert "restarted 3 times without 10 minutes of service in between, as many as --max-restarts allows" in text
    assert "Traceback" not in text
    server = start(tmp_path / "pause.log", *flags, environment=fault, wait=False)
    wait_for(lambda: "it starts again in 4 s" in server.log.read_text(), "a pause of 4 s")
    began = time.monotonic()
    assert server.stop() == 0 and time.monotonic() - began < 3


@pytest.mark.parametrize("flags", [("/nothing/here",), ("--tp", "2"), ("--port", "70000"), ("--max-restarts", "-1")])
def test_what_the_user_must_mend_is_said_once(tmp_path: Path, model: Path, flags: tuple[str, ...]) -> None:
    server = start(tmp_path / "server.log", *flags, wait=False)
    assert server.process.wait(END_SECONDS) == 1
    text = server.log.read_text()
    assert "starts again" not in text and "Traceback" not in text
    reasons = [line for line in text.splitlines() if not line.startswith("glint: no --model given")]
    assert reasons and len(reasons) == len(set(reasons))


def test_without_a_supervisor_the_process_ends(tmp_path: Path, model: Path) -> None:
    flags = (str(model), "--tp", "2", "--engine", TEST_LIBRARY, "--no-restart")
    with serving(tmp_path / "server.log", *flags, GLINT_FAULT="step:1:60") as server:
        assert server.engine_pid() == server.process.pid
        streams, ids = open_streams(server, 1)
        assert b'"code":"engine_failed"' in read_to_end(streams[0])
        assert server.process.wait(END_SECONDS) == 1
        assert lines_by_id(server) == {request_id: ["failed"] for request_id in ids}


def test_a_killed_supervisor_leaves_nothing(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "server.log", str(model)) as server:
        child = Path(f"/proc/{server.engine_pid()}")
        libraries = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libglint" not in libraries and "numpy" not in libraries
        assert "libglint" in (child / "maps").read_text()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not child.exists() or "State:\tZ" in (child / "status").read_text(), "the child is gone", 10)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", timeout=5)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_drains_once(tmp_path: Path, model: Path, sig: int) -> None:
    """As Ctrl-C in a terminal and systemd's control-group do it."""
    port, log = free_port(), tmp_path / "server.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "glint", "serve", str(model), "--port", str(port)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=output, start_new_session=True)
    server = Served(process, port, log)
    try:
        server.wait_ready()
        with connect(server, END_SECONDS) as stream:
            stream.sendall(request_bytes("/generate", LONG | {"max_tokens": 1000}))
            read_until(stream, b"data: ")
            os.killpg(process.pid, sig)
            assert b'"completion_tokens":1000' in read_to_end(stream)
        assert process.wait(END_SECONDS) == 0
        text = log.read_text()
        assert text.count("draining, up to 60 s") == 1 and "Traceback" not in text and "KeyboardInterrupt" not in text
        assert [line["outcome"] for line in server.outcome_lines()] == ["length"]
    finally:
        process.kill()
        process.wait()


def test_a_child_that_dies_while_it_drains_is_not_started_again(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path / "server.log", str(model)) as server:
        streams, ids = open_streams(server, 1)
        child = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in server.log.read_text(), "it drains")
        os.kill(child, signal.SIGSEGV)
        assert server.process.wait(END_SECONDS) == 1
        streams[0].close()
        assert lines_by_id(server) == {request_id: ["lost"] for request_id in ids}
        assert "was killed by SIGSEGV while it drained" in server.log.read_text()
