"""A server whose steps stop completing, one that is told to end while it loads, and one that listens for everybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.served import ROOT, free_port, served

STALLING = """
import os, sys, time
from glint.native.library import NativeEngine
collect = NativeEngine.collect_step
def collect_or_stall(self, ticket):
    while os.path.exists(os.environ["STALL_FILE"]):
        time.sleep(0.1)
    return collect(self, ticket)
NativeEngine.collect_step = collect_or_stall
from glint.cli import main
sys.exit(main(sys.argv[1:]))
"""
LOADING = """
import sys, time
from glint.server.serve import Server
load = Server._load_engine
def load_slowly(self, checkpoint, sized):
    time.sleep(600)
    return load(self, checkpoint, sized)
Server._load_engine = load_slowly
from glint.cli import main
sys.exit(main(sys.argv[1:]))
"""
END_SECONDS = 60


@contextmanager
def running(program: str, log: Path, port: int, *flags: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server with a changed part, ended with the block."""
    command = [sys.executable, "-c", program, "serve", "--port", str(port), *flags]
    with log.open("wb") as target:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stderr=target)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for_status(port: int, path: str, status: int) -> None:
    """Wait until a watching route answers with this status."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}{path}", timeout=10).status_code == status:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    pytest.fail(f"{path} did not answer with {status}")


def test_a_server_whose_steps_stall_ends_for_a_supervisor(tmp_path: Path) -> None:
    port, stall_file, log = free_port(), tmp_path / "stall", tmp_path / "server.log"
    with running(STALLING, log, port, "--health-timeout", "2", STALL_FILE=str(stall_file)) as process:
        wait_for_status(port, "/ready", 200)
        body = {"prompt": "Once upon a time", "max_tokens": 4}
        assert httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60).status_code == 200
        stall_file.touch()
        answer = httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert "no step of the engine has completed for" in answer.json()["error"]["message"]
        assert process.wait(END_SECONDS) == 1
    assert "no step has completed for" in log.read_text()


def test_one_signal_ends_a_server_that_is_loading(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    with running(LOADING, log, port) as process:
        wait_for_status(port, "/health", 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0
    assert "nothing is served yet, the process ends" in log.read_text()


def test_an_open_address_without_a_key_is_warned_about(tmp_path: Path) -> None:
    with served(tmp_path / "open.log", "--host", "0.0.0.0") as server:
        assert "listening on 0.0.0.0 without an API key" in server.log.read_text()
    with served(tmp_path / "loopback.log") as server:
        assert "without an API key" not in server.log.read_text()
