"""HTTP by hand: requests that a proper client would not send, and clients that leave in the middle."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.e2e.served import Served

SECONDS = 60.0


def connect(server: Served, seconds: float = SECONDS) -> socket.socket:
    """A connection to the server that gives up after so many seconds."""
    return socket.create_connection(("127.0.0.1", server.port), seconds)


def request_bytes(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """A POST request as it goes over the wire."""
    content = json.dumps(body).encode()
    lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content))} | dict(
        headers or {}
    )
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode() + b"\r\n" + content


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection; a reset counts as its end."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Everything up to a mark and a little more."""
    received = b""
    while mark not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return received


def wait_for(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not so: {what}"
        time.sleep(0.02)


def outcomes_since(server: Served, before: int, count: int) -> list[dict[str, str]]:
    """The lines of `count` requests that ended after the first `before` ones; a line too many is an error."""
    wait_for(lambda: len(server.outcome_lines()) >= before + count, f"{count} more outcome lines")
    server.wait_idle()
    time.sleep(0.2)
    lines = server.outcome_lines()[before:]
    assert len(lines) == count, lines
    return lines


def outcome_of(server: Served, request_id: str) -> dict[str, str]:
    """The one line of a request."""
    wait_for(lambda: any(line["request_id"] == request_id for line in server.outcome_lines()), f"line of {request_id}")
    (line,) = [line for line in server.outcome_lines() if line["request_id"] == request_id]
    return line


def pages_of(server: Served) -> dict[str, int]:
    """The pages that are free, held and cached."""
    pages = server.stats()["pages"]
    assert isinstance(pages, dict)
    return pages


def check_all_free(server: Served) -> None:
    """No request runs, waits or holds a page."""
    server.wait_idle()
    wait_for(lambda: pages_of(server)["held"] == 0, "no page is held")
