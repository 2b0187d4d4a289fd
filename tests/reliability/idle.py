"""Idle: a thousand kept connections that say nothing cost little, and others are served beside them."""

from __future__ import annotations

import resource
import time
from contextlib import ExitStack
from socket import create_connection, socket

from tests.reliability.options import Options
from tests.reliability.report import PartReport, percentile
from tests.reliability.target import Target

NUM_CONNECTIONS = 1000
NUM_ASKED = 20
SPARE_FILES = 200
BYTES_PER_CONNECTION = 64 * 1024
MESSAGE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def idle(options: Options) -> PartReport:
    """Run the part."""
    report = PartReport(
        "idle",
        f"{NUM_CONNECTIONS:,} connections, each kept after one GET /health; {NUM_ASKED} known requests one after the "
        "other before and beside them.",
    )
    raise_file_limit(NUM_CONNECTIONS + SPARE_FILES)
    with options.server("idle") as target, ExitStack() as stack:
        known = target.known_answer()
        alone = [ask(target, known) for _ in range(NUM_ASKED)]
        before = target.memory_bytes()
        held = [stack.enter_context(create_connection(target.address, 30)) for _ in range(NUM_CONNECTIONS)]
        answered = 0
        for connection in held:
            connection.sendall(MESSAGE)
        for connection in held:
            answered += b" 200 " in connection.recv(4096)[:20]
        after = target.memory_bytes()
        beside = [ask(target, known) for _ in range(NUM_ASKED)]
        closed = sum(is_closed(connection) for connection in held)
    each = (after - before) / NUM_CONNECTIONS
    table = report.table("connections", "figure", "value")
    table.add("connections answered and kept", answered - closed)
    table.add("server memory per connection, KiB", each / 1024)
    table.add("known request alone, p50 ms", 1000 * (percentile([one[0] for one in alone], 50) or 0))
    table.add("known request beside them, p50 ms", 1000 * (percentile([one[0] for one in beside], 50) or 0))
    report.figures |= {"bytes_per_connection": each, "answered": answered, "closed": closed}
    report.promise("every connection is answered and kept", answered == NUM_CONNECTIONS and closed == 0)
    report.promise("others get the known answer", all(one[1] for one in [*alone, *beside]))
    bound = BYTES_PER_CONNECTION / 1024
    report.promise(f"at most {bound:g} KiB per connection", each <= BYTES_PER_CONNECTION, each / 1024)
    return report


def ask(target: Target, known: list[int] | None) -> tuple[float, bool]:
    """Seconds of the known request, and whether it gave the known answer."""
    began = time.monotonic()
    answer = target.known_answer()
    return time.monotonic() - began, answer is not None and answer == known


def is_closed(connection: socket) -> bool:
    """Whether the server has closed a connection on which nothing is to be read."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def raise_file_limit(wanted: int) -> None:
    """Allow this process so many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise RuntimeError(f"the system allows {hard} open files; {wanted} are needed: raise ulimit -n")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
