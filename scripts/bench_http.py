#!/usr/bin/env python3
"""The HTTP layer beside others: one small application behind several servers, asked the same hostile questions.

    python -m venv peers && peers/bin/pip install uvicorn httptools h11 uvloop granian hypercorn
    .venv/bin/python scripts/bench_http.py peers/bin

Processor time is that of the server's process, which the application tells; of three runs the median.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

ROOT = Path(__file__).resolve().parent.parent
PORT = 9400
WRITE_NOW = "glint.write_now"
EVENT = b"data: " + b"x" * 92 + b"\n\n"
EVENTS = 300
FLOOD_BYTES = 20 * 2**20
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAA\r\n"
FIGURES: dict[str, float] = {"left": 0, "unread": 0, "cost": 0}
WRITERS: list[Any] = []
QUEUES: list[asyncio.Queue[bytes]] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The application: streams, bodies sent back, and figures of the process."""
    if scope["path"] == "/stream":
        return await stream(scope, send, dict(parse_qsl(scope["query_string"].decode())))
    FIGURES["memory"] = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    body, has_more = b"", scope["method"] == "POST"
    while has_more:
        message = await receive()
        body, has_more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/leave":
        FIGURES["left"] += (await receive())["type"] == "http.disconnect"
        return None
    body = body or json.dumps(FIGURES).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def stream(scope: Any, send: Any, asked: dict[str, str]) -> None:
    """One of `count` streams that get their events from one producer, or a long one on its own."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    if "alone" in asked:
        FIGURES["unread"] = 1
        try:
            for _ in range(10_000):
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
        finally:
            FIGURES["unread"] = 0
        return
    events: asyncio.Queue[bytes] = asyncio.Queue()
    QUEUES.append(events)
    WRITERS.append(scope["extensions"][WRITE_NOW] if "now" in asked else events.put_nowait)
    if len(QUEUES) == int(asked["count"]):
        await produce()
    while event := await events.get():
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def produce() -> None:
    """Give every stream one event a step, as an engine does; take the processor time."""
    began = time.process_time()
    for _ in range(EVENTS):
        for write in WRITERS:
            write(EVENT)
        await asyncio.sleep(0.002)
    FIGURES["cost"] = 1e6 * (time.process_time() - began) / (len(WRITERS) * EVENTS)
    for events in QUEUES:
        events.put_nowait(b"")
    WRITERS.clear()
    QUEUES.clear()


def commands(peers: Path) -> dict[str, list[str]]:
    """How every server is started."""
    listen = ["--port", str(PORT), "--log-level", "critical", "bench_http:app"]
    uvicorn = ["uvicorn", "--loop", "uvloop", "--lifespan", "off", "--ws", "none", *listen, "--http"]
    bind = ["--bind", f"127.0.0.1:{PORT}", "--log-level", "critical", "bench_http:app"]
    return {
        "glint": [sys.executable, "-m", *uvicorn, "glint.server.http.connection:BoundedConnection"],
        "uvicorn, httptools": [f"{peers}/python", "-m", *uvicorn, "httptools"],
        "uvicorn, h11": [f"{peers}/python", "-m", *uvicorn, "h11"],
        "granian": [f"{peers}/granian", "--interface", "asginl", "--loop", "uvloop", *listen],
        "hypercorn": [f"{peers}/hypercorn", "--worker-class", "uvloop", *bind],
    }


def connect(*sent: bytes) -> socket.socket:
    """A connection on which these pieces have been sent, one after the other."""
    connection = socket.create_connection(("127.0.0.1", PORT), 1.5)
    for piece in sent:
        connection.sendall(piece)
        time.sleep(0.2 if len(sent) > 1 else 0)
    return connection


def ask(*sent: bytes) -> bytes:
    """What is answered until the end, or until nothing has come for 1.5 s."""
    received = b""
    with connect(*sent) as connection, suppress(OSError):
        while piece := connection.recv(65536):
            received += piece
    return received


def figures() -> dict[str, float]:
    """What the application tells about its process."""
    return dict(json.loads(ask(GET + b"Connection: close\r\n\r\n").partition(b"\r\n\r\n")[2]))


def flood_with_trailers() -> str:
    """The memory that endless trailers take, and whether the server cuts them off."""
    before, sent = figures()["memory"], 0
    with connect(GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n") as connection:
        with suppress(OSError):
            while sent < FLOOD_BYTES:
                sent += connection.send(b"a:b\r\n" * 10_000)
        return f"{(figures()['memory'] - before) / 2**20:.0f} MB, {'cut off' if sent < FLOOD_BYTES else 'all read'}"


def ask_oddly() -> list[str]:
    """Whether a body with `Upgrade: h2c` arrives, how HTTP/1.0 gets a stream, whether a pipelining client may leave."""
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n" + UPGRADE + b"\r\n"
    is_kept = all(ask(*sent).endswith(b"hello") for sent in ([head + b"hello"], [head, b"hello"]))
    old = ask(b"GET /stream?count=1 HTTP/1.0\r\n\r\n")
    connect(b"POST /leave HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi" + GET + b"\r\n", b"").close()
    time.sleep(1)
    framing = "chunks" if b"chunked" in old.lower() else "closes" if old.endswith(EVENT) else "cut"
    return ["kept" if is_kept else "lost", framing, "ended" if figures()["left"] else "runs on"]


def leave_unread() -> str:
    """The memory that a stream takes which nobody reads, and whether it is ended within 40 s."""
    before = figures()["memory"]
    with connect(b"GET /stream?alone=1 HTTP/1.1\r\nHost: a\r\n\r\n"):
        time.sleep(5)
        grown, deadline = (figures()["memory"] - before), time.monotonic() + 35
        while figures()["unread"] and time.monotonic() < deadline:
            time.sleep(1)
        return f"{grown / 2**20:.0f} MB, {'waits' if figures()['unread'] else 'ended'}"


def idle_kilobytes() -> str:
    """The memory of an idle connection that has had one answer."""
    before, connections = figures()["memory"], [connect(GET + b"\r\n") for _ in range(1000)]
    for connection in connections:
        connection.recv(4096)
    return f"{(figures()['memory'] - before) / 1024 / len(connections):.1f}"


def cost(count: int, options: str = "") -> float:
    """Microseconds of processor time per event of `count` streams."""
    request = f"GET /stream?count={count}{options} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
    for connection in [connect(request) for _ in range(count)]:
        connection.settimeout(60)
        while connection.recv(2**20):
            pass
    return figures()["cost"]


def measure(name: str, command: list[str]) -> list[str]:
    """The row of one server."""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    process = subprocess.Popen(command, env=os.environ | paths, start_new_session=True)
    try:
        for _ in range(100):
            with suppress(OSError, ValueError):
                time.sleep(0.1)
                figures()
                break
        kinds = [(64, ""), (256, "")] + ([(64, "&now=1"), (256, "&now=1")] if name == "glint" else [])
        idle, costs = idle_kilobytes(), [statistics.median(cost(*kind) for _ in range(3)) for kind in kinds]
        shown = [" / ".join(f"{cost:.1f}" for cost in costs[at::2]) for at in (0, 1)]
        return [name, *ask_oddly(), leave_unread(), flood_with_trailers(), *shown, idle]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    for name, command in commands(Path(sys.argv[1]).absolute()).items():
        print("| " + " | ".join(measure(name, command)) + " |", flush=True)
