"""The server that is tried: one of our own with its processes, memory and log, or one at an address."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.served import Served, free_port, start

KNOWN = {"prompt": "The quick brown fox", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
OWN_MEMORY = ("RssAnon:", "RssShmem:")
SAMPLE_SECONDS = 0.5


@dataclass
class Target:
    """Where to send requests. `served` is there for a server that we started, `folder` its log and temporary files."""

    url: str
    served: Served | None = None
    folder: Path | None = None
    model: str = ""
    max_len: int = 0

    def __post_init__(self) -> None:
        entry = httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]
        self.model, self.max_len = str(entry["id"]), int(entry["max_model_len"])

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    def stats(self) -> dict[str, Any]:
        """The server's own figures."""
        return dict(httpx.get(f"{self.url}/stats", timeout=60).json())

    def memory_bytes(self) -> int:
        """Resident memory that files do not back, over all processes of a server of ours; else what /stats says."""
        if self.served is None:
            return int(self.stats()["process_resident_memory_bytes"])
        return sum(map(resident_bytes, process_tree(self.served.process.pid)))

    def known_answer(self, seconds: float = 60.0) -> list[int] | None:
        """The tokens of a fixed greedy request; None where it is not answered."""
        try:
            answer = httpx.post(f"{self.url}/generate", json=KNOWN, timeout=seconds)
        except httpx.TransportError:
            return None
        return list(answer.json()["choices"][0]["token_ids"]) if answer.status_code == 200 else None

    def tokens_of(self, text: str) -> float:
        """The tokens of a text that is repeated often, by the server's own tokenizer."""
        answer = httpx.post(f"{self.url}/tokenize", json={"prompt": text * 64}, timeout=60)
        return float(answer.json()["count"]) / 64

    def is_ready(self) -> bool:
        """Whether /ready says so."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def outcome_lines(self) -> list[dict[str, str]] | None:
        """The line of every request that has ended; None where the log is not ours."""
        return None if self.served is None else self.served.outcome_lines()

    def wait_idle(self, seconds: float = 120.0) -> dict[str, Any]:
        """Wait until nothing runs or waits; gives the figures of that moment."""
        deadline = time.monotonic() + seconds
        while True:
            stats = self.stats()
            if stats["requests_running"] == 0 and stats["requests_waiting"] == 0:
                return stats
            if time.monotonic() > deadline:
                raise RuntimeError(f"requests still run or wait {seconds:g} s after the last one was sent")
            time.sleep(0.1)

    @property
    def engine_pid(self) -> int:
        """The process of the engine: the only child of `glint serve`, or the process itself where it has none."""
        assert self.served is not None
        children = child_pids(self.served.process.pid)
        return children[0] if children else self.served.process.pid

    @property
    def has_supervisor(self) -> bool:
        """Whether the engine runs in a child."""
        return self.served is not None and self.engine_pid != self.served.process.pid


def child_pids(pid: int) -> list[int]:
    """The processes that a process has started and that still are."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def process_tree(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(below for child in child_pids(pid) for below in process_tree(child))]


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    """Memory of one process that is resident and not backed by files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(OWN_MEMORY))


@contextmanager
def own_server(
    folder: Path, flags: Sequence[str], environment: dict[str, str] | None = None, module: str = "glint"
) -> Iterator[Target]:
    """A server of ours for the time of a block; no process of it outlives the block."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    given = {"TMPDIR": str(temporary)} | (environment or {})
    served = start(folder / "server.log", *flags, port=free_port(), environment=given, module=module)
    try:
        yield Target(served.url, served, folder)
    finally:
        end_all(served)


def end_all(served: Served) -> None:
    """Stop a server by its signal, and what is left of it by force."""
    pids = process_tree(served.process.pid) if served.process.poll() is None else []
    if pids:
        served.process.send_signal(signal.SIGTERM)
        with suppress(Exception):
            served.process.wait(20)
    for pid in [served.process.pid, *pids]:
        if is_alive(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    served.process.wait()


@dataclass
class MemoryWatch:
    """Reads the memory of a server now and then while a block runs: (seconds since the start, bytes)."""

    target: Target
    samples: list[tuple[float, int]] = field(default_factory=list)

    def __enter__(self) -> MemoryWatch:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            with suppress(httpx.TransportError):
                self.samples.append((time.monotonic() - self._started, self.target.memory_bytes()))
            self._is_over.wait(SAMPLE_SECONDS)
