#!/usr/bin/env python3
"""The HTTP layer beside others: one small application behind several servers, asked the same hostile questions.

    python -m venv peers && peers/bin/pip install uvicorn httptools h11 uvloop granian hypercorn
    .venv/bin/python scripts/bench_http.py --peers peers/bin

Processor time is that of the server's process, read by the application itself. Every figure is the median of three.
"""

import argparse
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
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

ROOT = Path(__file__).resolve().parent.parent
WRITE_NOW = "glint.write_now"
EVENT = b"data: " + b"x" * 92 + b"\n\n"
EVENTS = 300
WARM_EVENTS = 30
FLOOD_BYTES = 20 * 2**20
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAA\r\n"
COUNTS = {"left": 0, "flooding": 0}
WAITING: list[Any] = []
ENDS: list[asyncio.Queue[bytes]] = []
COST = {"microseconds": 0.0}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Streams, echoes and tells what the process has used."""
    if scope["type"] != "http":
        return
    path, query = scope["path"], dict(parse_qsl(scope["query_string"].decode()))
    if path == "/stream":
        return await stream(scope, send, int(query["count"]))
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    body = json.dumps(COST | COUNTS | {"memory": memory, "cpu": time.process_time()}).encode()
    if path in ("/echo", "/leave"):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
    if path == "/leave":
        COUNTS["left"] += (await receive())["type"] == "http.disconnect"
        return None
    if path == "/flood":
        return await flood(send)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def flood(send: Any) -> None:
    """Stream to a client that does not read."""
    COUNTS["flooding"] = 1
    try:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100_000):
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            await asyncio.sleep(0)
    finally:
        COUNTS["flooding"] = 0


async def stream(scope: Any, send: Any, count: int) -> None:
    """One of `count` streams that get their events from one producer, as from the steps of an engine."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    events: asyncio.Queue[bytes] = asyncio.Queue()
    write = (scope.get("extensions") or {}).get(WRITE_NOW) if "GLINT_WRITE_NOW" in os.environ else None
    WAITING.append(write or events.put_nowait)
    ENDS.append(events)
    if len(WAITING) == count:
        await produce()
    while event := await events.get():
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def produce() -> None:
    """Give every stream one event a step and take the processor time of all but the first steps."""
    began = 0.0
    for step in range(EVENTS):
        if step == WARM_EVENTS:
            began = time.process_time()
        for give in WAITING:
            give(EVENT)
        await asyncio.sleep(0.002)
    COST["microseconds"] = 1e6 * (time.process_time() - began) / (len(WAITING) * (EVENTS - WARM_EVENTS))
    for events in ENDS:
        events.put_nowait(b"")
    WAITING.clear()
    ENDS.clear()


def run_own(port: int) -> None:
    """The application behind glint's connections."""
    import uvicorn
    import uvloop

    sys.path.insert(0, str(ROOT))
    from glint.server.connection import BoundedConnection

    config = uvicorn.Config(app, http=BoundedConnection, ws="none", lifespan="off", port=port, log_level="critical")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(config).serve())


def commands(peers: Path, port: int) -> dict[str, list[str]]:
    """How every server is started."""
    own = [sys.executable, __file__, "--own", str(port)]
    name, listen = "bench_http:app", ["--port", str(port), "--log-level", "critical"]
    uvicorn = [str(peers / "uvicorn"), name, "--loop", "uvloop", "--lifespan", "off", *listen]
    granian = [str(peers / "granian"), "--interface", "asginl", "--loop", "uvloop", *listen, name]
    hypercorn = [str(peers / "hypercorn"), "-k", "uvloop", "-b", f"127.0.0.1:{port}", "--log-level", "critical", name]
    return {
        "glint": own,
        "glint, write_now": own,
        "uvicorn, httptools": [*uvicorn, "--http", "httptools"],
        "uvicorn, h11": [*uvicorn, "--http", "h11"],
        "granian": granian,
        "hypercorn": hypercorn,
    }


class Client:
    """Talks to the server by raw sockets."""

    def __init__(self, port: int) -> None:
        self._port = port

    def connect(self) -> socket.socket:
        """A new connection."""
        return socket.create_connection(("127.0.0.1", self._port), 10)

    def ask(self, request: bytes, more: bytes = b"") -> bytes:
        """What is answered until the end or until 1.5 s are over."""
        with self.connect() as connection:
            connection.settimeout(1.5)
            connection.sendall(request)
            received = bytearray()
            with suppress(OSError):
                if more:
                    time.sleep(0.2)
                    connection.sendall(more)
                while piece := connection.recv(65536):
                    received += piece
            return bytes(received)

    def figures(self) -> dict[str, float]:
        """What the application tells about its process."""
        answer = self.ask(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        figures: dict[str, float] = json.loads(answer.partition(b"\r\n\r\n")[2])
        return figures

    def trailers(self) -> str:
        """The memory that endless trailers take, and whether they are cut off."""
        before, sent, is_cut, piece = self.figures()["memory"], 0, False, b"a:b\r\n" * 10_000
        with self.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
            try:
                while sent < FLOOD_BYTES:
                    sent += connection.send(piece)
            except OSError:
                is_cut = True
            grown = (self.figures()["memory"] - before) / 2**20
        return f"{grown:.0f} MB, {'cut off' if is_cut else 'all read'}"

    def leave(self) -> str:
        """Whether a client that pipelined a second request is seen to leave."""
        before = self.figures()["left"]
        with self.connect() as connection:
            connection.sendall(b"POST /leave HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi" + b"GET / HTTP/1.1\r\n\r\n")
            time.sleep(0.3)
        time.sleep(1)
        return "ended" if self.figures()["left"] > before else "runs on"

    def upgrade(self) -> str:
        """Whether the body of a request with `Upgrade: h2c` arrives, in one segment and in two."""
        head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n" + UPGRADE + b"\r\n"
        answers = [self.ask(head + b"hello"), self.ask(head, b"hello")]
        return "kept" if all(answer.endswith(b"hello") for answer in answers) else "lost"

    def old(self) -> str:
        """How a stream is framed for HTTP/1.0."""
        answer = self.ask(b"GET /stream?count=1 HTTP/1.0\r\n\r\n")
        return "chunks" if b"chunked" in answer.lower() else "closes" if answer.endswith(EVENT) else "cut"

    def unread(self) -> str:
        """The memory that a stream takes which nobody reads, and whether it is ended within 40 s."""
        before = self.figures()["memory"]
        with self.connect() as connection:
            connection.sendall(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
            time.sleep(5)
            grown, deadline = (self.figures()["memory"] - before) / 2**20, time.monotonic() + 35
            while self.figures()["flooding"] and time.monotonic() < deadline:
                time.sleep(1)
            return f"{grown:.0f} MB, {'waits' if self.figures()['flooding'] else 'ended'}"

    def idle(self, count: int = 1000) -> float:
        """Kilobytes of an idle connection that has had one answer."""
        before = self.figures()["memory"]
        connections = [self.connect() for _ in range(count)]
        for connection in connections:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            connection.recv(4096)
        grown = self.figures()["memory"] - before
        for connection in connections:
            connection.close()
        return grown / 1024 / count

    def request_cost(self, count: int = 2000) -> float:
        """Microseconds of processor time per small request on one connection."""
        before = self.figures()["cpu"]
        with self.connect() as connection:
            for _ in range(count):
                connection.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")
                connection.recv(4096)
        return 1e6 * (self.figures()["cpu"] - before) / count

    def cost(self, count: int) -> float:
        """Microseconds of processor time per event of `count` streams."""
        connections = [self.connect() for _ in range(count)]
        for connection in connections:
            connection.sendall(b"GET /stream?count=%d HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % count)
        for connection in connections:
            with closing(connection), suppress(OSError):
                while connection.recv(2**20):
                    pass
        return self.figures()["microseconds"]


def measure(name: str, command: list[str], port: int) -> list[str]:
    """The row of one server."""
    environment = os.environ | ({"GLINT_WRITE_NOW": "1"} if "write_now" in name else {})
    process = subprocess.Popen(command, cwd=ROOT / "scripts", env=environment, start_new_session=True)
    client = Client(port)
    try:
        for _ in range(100):
            with suppress(OSError, ValueError):
                client.figures()
                break
            time.sleep(0.1)
        idle = client.idle()
        request = statistics.median(client.request_cost() for _ in range(3))
        costs = [statistics.median(client.cost(count) for _ in range(3)) for count in (64, 256)]
        hostile = [client.upgrade(), client.old(), client.leave(), client.unread(), client.trailers()]
        return [name, *hostile, *(f"{cost:.1f}" for cost in costs), f"{request:.0f}", f"{idle:.1f}"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Print one row per server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--own", type=int)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if options.own:
        return run_own(options.own)
    print("| server | h2c body | HTTP/1.0 | leaves, pipelined | unread stream | trailers | us/event 64 | 256 | us/request | KB/idle |")
    for port, (name, command) in enumerate(commands(options.peers.absolute(), 9400).items(), 9400):
        if options.only in name:
            command = [part.replace("9400", str(port)) for part in command]
            print("| " + " | ".join(measure(name, command, port)) + " |", flush=True)
    return None


if __name__ == "__main__":
    main()
