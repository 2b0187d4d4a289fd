"""Slow: readers that read nothing or a byte a second, senders that drip headers and bodies, beside normal streams."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from tests.reliability.client import post, request
from tests.reliability.load import Load, load_beside, output_tokens, put_load
from tests.reliability.options import Options
from tests.reliability.report import MEBIBYTE, PartReport
from tests.reliability.target import MemoryWatch, Target

STALL_SECONDS = 30.0
HEADER_SECONDS = 10.0
BODY_SECONDS = 30.0
SLACK_SECONDS = 15.0
DRIP_SECONDS = 1.0
MEMORY_PER_READER = 2 * MEBIBYTE
MEMORY_SPARE = 16 * MEBIBYTE
NORMAL_STREAMS = 4
SLOWER = 3.0
READERS = ("reads nothing", "reads a byte a second")
SENDERS = {"drips headers": HEADER_SECONDS, "drips a body": BODY_SECONDS}
HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
BODY_HEAD = request("POST", "/generate", b" " * 100_000)[:-100_000] + b'{"prompt":"'


@dataclass
class Slow:
    """One slow client and the time at which the server ended its connection."""

    kind: str
    connection: socket.socket
    ended_after: float | None = None


def slow(options: Options) -> PartReport:
    """Run the part."""
    count = 8 if options.short else 64
    watched = BODY_SECONDS + SLACK_SECONDS
    report = PartReport(
        "slow",
        f"{count} clients of each kind: streams of which nothing or one byte a second is read, headers and bodies that "
        f"come a byte a second; {NORMAL_STREAMS} normal streams before and beside them.",
    )
    with options.server("slow", "--max-num-seqs", str(4 * count)) as target, ExitStack() as stack:
        tokens = output_tokens(target, 96)
        alone = put_load(options, target, NORMAL_STREAMS, 4 if options.short else 15, tokens, label="alone")
        before = target.memory_bytes()
        with load_beside(options, target, NORMAL_STREAMS, watched, tokens) as future, MemoryWatch(target) as watch:
            clients = open_all(target, count, stack)
            drip_until(clients, watched)
            beside = future.result()
        grown = max(num for _, num in watch.samples) - before
        idle = target.wait_idle()
        lines = target.outcome_lines()
    tell_clients(report, clients, lines)
    tell_others(report, alone, beside, judges_speed=not options.short)
    bound = 2 * count * MEMORY_PER_READER + MEMORY_SPARE
    report.table("memory of the server", "figure", "MiB").add("most, above the start", grown / MEBIBYTE)
    report.promise(f"memory grows by at most {bound / MEBIBYTE:g} MiB", grown <= bound, grown / MEBIBYTE)
    report.promise("no page is held afterwards", idle["pages"]["held"] == 0)
    report.figures |= {"memory_growth_bytes": grown}
    return report


def open_all(target: Target, count: int, stack: ExitStack) -> list[Slow]:
    """Open the connections of every kind and send how each begins."""
    openings: dict[str, Callable[[int], bytes]] = {
        READERS[0]: lambda index: long_stream(target, f"slow-nothing-{index}"),
        READERS[1]: lambda index: long_stream(target, f"slow-byte-{index}"),
        "drips headers": lambda index: HEAD,
        "drips a body": lambda index: BODY_HEAD,
    }
    clients = []
    for kind, opening in openings.items():
        for index in range(count):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(30)
            connection.connect(target.address)
            connection.sendall(opening(index))
            connection.setblocking(False)
            clients.append(Slow(kind, connection))
    return clients


def long_stream(target: Target, user: str) -> bytes:
    """A stream that is longer than what the kernel and the server keep for a client that does not read."""
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": min(600, target.max_len // 2),
        "ignore_eos": True,
        "temperature": 1.0,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
        "user": user,
    }
    return post("/v1/chat/completions", body)


def drip_until(clients: list[Slow], seconds: float) -> None:
    """Send and read a byte a second where a client does, and note when the server ends a connection."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for client in clients:
            if client.ended_after is None and client.kind != READERS[0] and has_ended(client):
                client.ended_after = time.monotonic() - began
        time.sleep(DRIP_SECONDS)


def has_ended(client: Slow) -> bool:
    """Read a byte, or send one and look for the end."""
    try:
        if client.kind == READERS[1]:
            return client.connection.recv(1) == b""
        client.connection.send(b"a")
        while piece := client.connection.recv(4096):
            del piece
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def tell_clients(report: PartReport, clients: list[Slow], lines: list[dict[str, str]] | None) -> None:
    """Add when the connections of each kind ended; the end of one that reads nothing is in its outcome line."""
    table = report.table(
        "slow clients", "kind", "connections", "ended by the server", "last ended after s", "allowed s"
    )
    for kind, allowed in SENDERS.items():
        ends = [client.ended_after for client in clients if client.kind == kind]
        known = [end for end in ends if end is not None]
        table.add(kind, len(ends), len(known), max(known, default=None), allowed)
        is_so = len(known) == len(ends) and max(known, default=0.0) <= allowed + SLACK_SECONDS
        report.promise(f"who {kind} is ended in {allowed:g} s, at most {SLACK_SECONDS:g} s late", is_so)
    for kind, mark in zip(READERS, ("slow-nothing-", "slow-byte-"), strict=True):
        count = sum(client.kind == kind for client in clients)
        if lines is None:
            table.add(kind, count, None, None, STALL_SECONDS)
            continue
        mine = [line for line in lines if line["user"].startswith(mark)]
        left = [float(line["total_seconds"]) for line in mine if line["reason"] == "client_left"]
        table.add(kind, count, len(left), max(left, default=None), STALL_SECONDS)
        report.figures[kind] = {"lines": len(mine), "ended": len(left), "last_seconds": max(left, default=None)}
        report.promise(f"one outcome line for each that {kind}", len(mine) == count, len(mine))
        if kind == READERS[0]:
            is_so = len(left) == count and max(left) <= STALL_SECONDS + SLACK_SECONDS
            report.promise(f"who {kind} is ended in {STALL_SECONDS:g} s, at most {SLACK_SECONDS:g} s late", is_so)


def tell_others(report: PartReport, alone: Load, beside: Load, *, judges_speed: bool) -> None:
    """Add what the normal streams had of it."""
    table = report.table("normal streams", "when", "served", "failed", "TPOT p50 ms", "TPOT p99 ms", "TTFT p99 ms")
    for name, load in (("alone", alone), ("beside slow clients", beside)):
        row = (load.tpot_ms(50), load.tpot_ms(99), load.ttft_ms(99))
        table.add(name, len(load.served), len(load.failed) + len(load.refused), *row)
        report.figures[name] = {"served": len(load.served), "tpot_p50_ms": row[0], "tpot_p99_ms": row[1]}
    bad = [f"{one.status} {one.ending} {one.message}" for one in [*beside.failed, *beside.refused]]
    report.problems += bad
    report.promise("every normal stream is served whole", not bad and bool(beside.served), len(beside.served))
    ratio = beside.tpot_ms(50) / max(alone.tpot_ms(50), 1e-9)
    is_so = ratio <= SLOWER if judges_speed else None
    report.promise(f"normal streams take at most {SLOWER:g} times as long per token", is_so, ratio)
