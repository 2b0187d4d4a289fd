"""Kill: kill -9 of a server under load, and a fresh start on its port; nothing of the first is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.served import start
from tests.reliability.load import load_beside, output_tokens
from tests.reliability.options import Options
from tests.reliability.report import PartReport
from tests.reliability.target import Target, end_all, is_alive, process_tree

GONE_SECONDS = 10.0
CLIENTS = 8
LOAD_SECONDS = 3.0


@dataclass(frozen=True)
class Left:
    """What was there before a server was killed and must not be afterwards."""

    pids: list[int]
    shared_files: set[str]
    temporary: Path


def kill(options: Options) -> PartReport:
    """Run the part."""
    report = PartReport(
        "kill",
        f"{CLIENTS} streams run; SIGKILL to all processes of the server at once, or to the first alone; then the same "
        "command on the same port.",
    )
    if options.url is not None:
        report.promise("not run: the server at --url is not ours to kill", None)
        return report
    columns = ("killed", "processes", "gone after s", "left behind", "ready again after s", "known answer")
    table = report.table("kill -9 under load", *columns)
    for who in ("all processes", "the first process"):
        with options.server(f"kill {who}", is_struck=True) as target:
            known = target.known_answer()
            pids = process_tree(target.served.process.pid) if target.served else []
            if who == "the first process" and len(pids) == 1:
                continue
            with load_beside(options, target, CLIENTS, LOAD_SECONDS, output_tokens(target, 256)):
                time.sleep(LOAD_SECONDS / 2)
                found = look(target)
                took, left = kill_and_look(target, found, pids if who == "all processes" else pids[:1])
            seconds, same = start_again(options, target, known)
        table.add(who, len(pids), took, ", ".join(left) or "nothing", seconds, same)
        report.figures[who] = {"gone_seconds": took, "left": left, "ready_seconds": seconds, "same_answer": same}
        report.promise(f"{who}: nothing is left behind within {GONE_SECONDS:g} s", not left, ", ".join(left))
        bound = options.ready_seconds
        report.promise(f"{who}: ready again within {bound:g} s", seconds <= bound, seconds)
        report.promise(f"{who}: the known answer is the same", same)
    return report


def look(target: Target) -> Left:
    """The processes, shared memory and temporary files of a server."""
    assert target.served is not None and target.folder is not None
    pids = process_tree(target.served.process.pid)
    mapped = {
        line.split(maxsplit=5)[5]
        for pid in pids
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line and not line.endswith("(deleted)")
    }
    return Left(pids, mapped, target.folder / "tmp")


def kill_and_look(target: Target, found: Left, victims: list[int]) -> tuple[float, list[str]]:
    """Kill processes; the seconds until nothing is left of the server, and what is left after all."""
    assert target.served is not None
    began = time.monotonic()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    target.served.process.wait(GONE_SECONDS)
    while True:
        left = remains(found, target)
        if not left or time.monotonic() - began > GONE_SECONDS:
            return time.monotonic() - began, left
        time.sleep(0.02)


def remains(found: Left, target: Target) -> list[str]:
    """What is still there."""
    left = [f"process {pid}" for pid in found.pids if is_alive(pid)]
    left += [f"shared memory {name}" for name in found.shared_files if Path(name).exists()]
    left += [f"temporary file {path.name}" for path in found.temporary.iterdir()]
    return left if is_port_free(target.address) else [*left, f"port {target.address[1]}"]


def is_port_free(address: tuple[str, int]) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def start_again(options: Options, target: Target, known: list[int] | None) -> tuple[float, bool]:
    """Start a server with the same flags on the same port; the seconds until it is ready, and whether it knows."""
    assert target.served is not None
    began = time.monotonic()
    command = target.served.process.args
    assert isinstance(command, list)
    flags = command[command.index(str(target.served.port)) + 1 :]
    again = start(target.served.log, *flags, port=target.served.port)
    try:
        seconds = time.monotonic() - began
        return seconds, known is not None and target.known_answer() == known
    finally:
        end_all(again)
