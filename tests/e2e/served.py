"""A real server process for the tests: started on a free port, ready when it says so, stopped at the end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
FLAGS_VARIABLE = "GLINT_SERVE_FLAGS"
START_SECONDS = 180.0
STOP_SECONDS = 60.0


class Served:
    """A running server: its address, its log, and its process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    @property
    def model(self) -> str:
        """The name of the served model."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=30).json()["data"][0]["id"])

    def stats(self) -> dict[str, object]:
        """The server's own figures."""
        return dict(httpx.get(f"{self.url}/stats", timeout=30).json())

    def outcome_lines(self) -> list[dict[str, str]]:
        """The line of every request that has ended, as its key=value pairs."""
        lines = [line for line in self.log.read_text().splitlines() if " glint.requests " in line]
        return [dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)) for line in lines]

    def count_outcomes(self, seconds: float = 60.0) -> int:
        """How many requests have ended, once the log has the line of each: the supervisor may write them late."""
        recorded = sum(self.stats()["requests_by_outcome"].values())
        deadline = time.monotonic() + seconds
        while len(self.outcome_lines()) < recorded:
            assert time.monotonic() < deadline, f"the log has no line for some of {recorded} requests"
            time.sleep(0.02)
        return recorded

    def engine_pid(self) -> int:
        """The process that serves and computes: the child of the supervisor, or with --no-restart the only one."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else pid

    def memory_bytes(self) -> int:
        """Memory of the serving process that is resident and its own."""
        for line in Path(f"/proc/{self.engine_pid()}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("smaps_rollup has no Pss_Anon")

    def wait_idle(self, seconds: float = 60.0) -> dict[str, object]:
        """Wait until no request runs or waits; gives the figures of that moment."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.stats()
            if stats["requests_running"] == 0 and stats["requests_waiting"] == 0:
                return stats
            time.sleep(0.1)
        raise AssertionError(f"the server is not idle after {seconds} s: {self.stats()}")

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until /ready says so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError("not ready in time:\n" + self.log.read_text())

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Send a signal and give the exit code."""
        self.process.send_signal(sig)
        return self.process.wait(STOP_SECONDS)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    log: Path,
    *flags: str,
    port: int | None = None,
    environment: dict[str, str] | None = None,
    wait: bool = True,
    module: str = "glint",
) -> Served:
    """Start a server with these flags, and those of GLINT_SERVE_FLAGS; its output goes to the log."""
    port = free_port() if port is None else port
    asked = os.environ.get(FLAGS_VARIABLE, "").split()
    command: Sequence[str] = [sys.executable, "-m", module, "serve", "--port", str(port), *flags, *asked]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=os.environ | (environment or {})
        )
    server = Served(process, port, log)
    if wait:
        try:
            server.wait_ready()
        except BaseException:
            process.kill()
            process.wait()
            raise
    return server


@contextmanager
def served(
    log: Path, *flags: str, environment: dict[str, str] | None = None, module: str = "glint"
) -> Iterator[Served]:
    """A server for the time of a block; killed at its end if it does not stop by itself."""
    server = start(log, *flags, environment=environment, module=module)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            try:
                server.stop()
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
