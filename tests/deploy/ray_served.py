"""The Ray cluster of the tests seen from outside: its processes, its logs, and `serve run` on it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.served import ROOT, free_port

SERVE = Path(sys.executable).with_name("serve")
CLUSTER = ROOT / "tests" / "deploy" / "ray_cluster.py"
APPLICATION = "default"
REPLICA_TITLE = "ray::ServeReplica:"
RUN_SECONDS = 180.0
STOP_SECONDS = 60.0


def wait_for(what: str, is_so: Callable[[], object], seconds: float = RUN_SECONDS) -> None:
    """Wait until something is so; fails with its name when it takes too long."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def read_proc(pid: int, name: str) -> str:
    """A file of /proc about a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parents() -> dict[int, int]:
    """The parent of every process that runs; one that only waits to be collected does not."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = read_proc(int(entry.name), "stat").rpartition(")")[2].split()
            if fields and fields[0] not in "ZX":
                found[int(entry.name)] = int(fields[1])
    return found


def descendants(pid: int) -> set[int]:
    """All processes below a process."""
    above = parents()
    found = {pid}
    while more := {child for child, parent in above.items() if parent in found} - found:
        found |= more
    return found - {pid}


class RayService:
    """Glint on a running cluster: what runs there, what the replicas wrote, and how it is deployed."""

    def __init__(
        self, cluster: subprocess.Popen[str], address: str, port: int, temp_dir: Path, environment: dict[str, str]
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._cluster = cluster
        self._address = address
        self._logs = temp_dir / "session_latest" / "logs"
        self._environment = environment

    def run(self, *words: str) -> None:
        """Run the documented command against this cluster; returns when the application is ready."""
        command = [SERVE, "run", "--non-blocking", "--address", self._address, *words]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, env=self._environment, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def delete(self) -> None:
        """Delete the application; returns when its replicas have ended."""
        assert self._cluster.stdin is not None and self._cluster.stdout is not None
        self._cluster.stdin.write(f"{APPLICATION}\n")
        self._cluster.stdin.flush()
        while (line := self._cluster.stdout.readline().strip()) != APPLICATION:
            assert line or self._cluster.poll() is None, "the cluster has ended"
        assert self.replicas() == set()

    def replicas(self) -> set[int]:
        """The process ids of the replicas that run."""
        return {pid for pid in descendants(self._cluster.pid) if read_proc(pid, "cmdline").startswith(REPLICA_TITLE)}

    def outcomes(self, pid: int) -> list[dict[str, str]]:
        """The line of every request that has ended in a replica, as its key=value pairs."""
        lines = [
            line
            for log in self._logs.glob(f"worker-*-{pid}.err")
            for line in log.read_text(errors="replace").splitlines()
            if " glint.requests " in line
        ]
        return [dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)) for line in lines]


@contextmanager
def ray_service() -> Iterator[RayService]:
    """A cluster for the time of a block; nothing of it is left afterwards."""
    temp_dir = Path(tempfile.mkdtemp(prefix="ray-"))
    port = free_port()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (temp_dir / "cluster.log").open("w") as log:
        cluster = subprocess.Popen(
            [sys.executable, CLUSTER, temp_dir, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    assert cluster.stdin is not None and cluster.stdout is not None
    with cluster:
        address = cluster.stdout.readline().strip()
        assert address, (temp_dir / "cluster.log").read_text()
        try:
            yield RayService(cluster, address, port, temp_dir, environment)
        finally:
            below = descendants(cluster.pid)
            cluster.stdin.close()
            code = cluster.wait(STOP_SECONDS)
            wait_for("the end of every process of the cluster", lambda: not below & parents().keys())
            assert code == 0, (temp_dir / "cluster.log").read_text()
            shutil.rmtree(temp_dir)
