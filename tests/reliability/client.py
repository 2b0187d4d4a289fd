"""A light HTTP/1.1 client that holds nothing back: answers as bytes, the moment of each, and clients that leave.

It shares its processors with the server that it tries, so a body is kept as it came and taken apart only when asked.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

import uvloop

Ending = Literal["open", "whole", "cut", "left", "late"]
Result = TypeVar("Result")
LAST_CHUNK = b"\r\n0\r\n\r\n"
KEPT_TAIL = 1024
USAGE = re.compile(rb'"(?:completion|output)_tokens":(\d+)')
REQUEST_IDS = ("x-request-id", "request-id")


class Answer:
    """What came back for one request, with times in seconds of `perf_counter`.

    "whole": complete. "cut": the server ended the connection before. "left": the client did. "late": the client has
    waited too long. `first` is the time of the first bytes of the body, `last` that of the last.
    """

    __slots__ = ("_fields", "body", "ending", "first", "head", "last", "num_bytes", "started", "status")

    def __init__(self) -> None:
        self.ending: Ending = "open"
        self.status: int | None = None
        self.head = b""
        self.body = bytearray()
        self.num_bytes = 0
        self.started = 0.0
        self.first: float | None = None
        self.last = 0.0
        self._fields: dict[str, str] | None = None

    @property
    def seconds(self) -> float:
        """From the request to the last byte."""
        return self.last - self.started

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, their names in lower case."""
        if self._fields is None:
            lines = self.head.decode("latin-1").split("\r\n")[1:]
            parts = (line.partition(":") for line in lines)
            self._fields = {name.strip().lower(): value.strip() for name, _, value in parts}
        return self._fields

    @property
    def request_id(self) -> str | None:
        """The id that the log knows the request by, where the answer told it."""
        return next((self.headers[name] for name in REQUEST_IDS if name in self.headers), None)

    @property
    def is_stream(self) -> bool:
        """Whether the body is made of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def content(self) -> bytes:
        """The body without its chunks; of a body that was cut, what is whole of it."""
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return bytes(self.body)
        parts: list[bytes] = []
        data = bytes(self.body)
        while True:
            line, separator, rest = data.partition(b"\r\n")
            size = int(line, 16) if separator else 0
            if size == 0 or len(rest) < size:
                return b"".join(parts)
            parts.append(rest[:size])
            data = rest[size + 2 :]

    def documents(self) -> list[Any]:
        """The events of a stream, or the one document of another body."""
        content = self.content()
        if not self.is_stream:
            return [json.loads(content)]
        lines = (line for line in content.split(b"\n") if line.startswith(b"data: "))
        return [json.loads(line[6:]) for line in lines if line != b"data: [DONE]"]

    def usage_tokens(self) -> int:
        """The output tokens that the last usage in the body tells, 0 where there is none; the tail is enough."""
        found = USAGE.findall(self.body)
        return int(found[-1]) if found else 0


class Connection(asyncio.Protocol):
    """One connection: a request, its answer, then perhaps another."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self.answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._buffer = b""
        self._length: int | None = None
        self._is_chunked = False
        self._has_body = True
        self._keeps_all = True
        self._leaves_at: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def connection_lost(self, problem: Exception | None) -> None:
        """End the answer that is under way; one without a length ends so."""
        self.is_open = False
        if self.answer is not None:
            has_no_length = bool(self.answer.head) and self._length is None and not self._is_chunked
            self._end("whole" if problem is None and has_no_length else "cut")

    def send(self, message: bytes, *, keeps_all: bool = True, leaves_at: int | None = None) -> asyncio.Future[Answer]:
        """Write a request. The client leaves once `leaves_at` bytes of the body are there, where that is given."""
        assert self._transport is not None and self.answer is None
        self.answer = Answer()
        self._done = asyncio.get_running_loop().create_future()
        self._keeps_all, self._leaves_at = keeps_all, leaves_at
        self._has_body = not message.startswith(b"HEAD ")
        self._buffer, self._length, self._is_chunked = b"", None, False
        self.answer.started = perf_counter()
        self._transport.write(message)
        return self._done

    def data_received(self, data: bytes) -> None:
        """Take in what came; the end of an answer is found from its length or its last chunk."""
        answer = self.answer
        if answer is None:
            return
        answer.last = perf_counter()
        if not answer.head:
            data = self._read_head(answer, data)
            if not answer.head:
                return
        if data:
            self._take(answer, data)
        if self.answer is not None and self._is_complete(answer):
            self._end("whole")

    def _read_head(self, answer: Answer, data: bytes) -> bytes:
        self._buffer += data
        while True:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return b""
            words = head.split(b" ", 2)
            status = int(words[1]) if head.startswith(b"HTTP/1.") and words[1].isdigit() else 0
            self._buffer = rest
            if not 100 <= status < 200:
                break
        answer.head, answer.status = head, status
        self._is_chunked = "chunked" in answer.headers.get("transfer-encoding", "")
        length = answer.headers.get("content-length")
        self._length = None if length is None else int(length)
        if not self._has_body or status in (204, 304):
            self._length, self._is_chunked = 0, False
        return rest

    def _take(self, answer: Answer, data: bytes) -> None:
        if answer.first is None:
            answer.first = answer.last
        answer.num_bytes += len(data)
        answer.body += data
        if not self._keeps_all and len(answer.body) > 8 * KEPT_TAIL:
            del answer.body[:-KEPT_TAIL]
        if self._leaves_at is not None and answer.num_bytes >= self._leaves_at and not self._is_complete(answer):
            self.leave()

    def _is_complete(self, answer: Answer) -> bool:
        if self._is_chunked:
            return answer.body.endswith(LAST_CHUNK) or answer.body == LAST_CHUNK[2:]
        return self._length is not None and answer.num_bytes >= self._length

    def leave(self, ending: Ending = "left") -> None:
        """Close the connection; what was written is still sent."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()
        self._end(ending)

    def _end(self, ending: Ending) -> None:
        answer, self.answer = self.answer, None
        if answer is None or self._done is None:
            return
        answer.ending = ending
        answer.last = answer.last or perf_counter()
        if not self._done.done():
            self._done.set_result(answer)
        if answer.headers.get("connection", "").lower() == "close" or ending != "whole":
            self.close()

    def close(self) -> None:
        """Drop the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class Line:
    """A client that sends one request after the other, on the same connection while the server keeps it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._connection: Connection | None = None

    async def exchange(
        self,
        message: bytes,
        *,
        seconds: float = 300.0,
        keeps_all: bool = True,
        leaves_at: int | None = None,
        leaves_after: float | None = None,
    ) -> Answer:
        """Send a request and read its answer, or leave at a number of bytes or after a time."""
        connection = self._connection
        try:
            if connection is None or not connection.is_open:
                connection = self._connection = await open_connection(self._host, self._port)
        except OSError:
            answer = Answer()
            answer.ending = "cut"
            return answer
        done = connection.send(message, keeps_all=keeps_all, leaves_at=leaves_at)
        loop = asyncio.get_running_loop()
        leaving: Ending = "late" if leaves_after is None else "left"
        timer = loop.call_later(seconds if leaves_after is None else leaves_after, connection.leave, leaving)
        try:
            return await done
        finally:
            timer.cancel()

    @property
    def answer(self) -> Answer | None:
        """The answer that is under way."""
        return None if self._connection is None else self._connection.answer

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()


async def open_connection(host: str, port: int) -> Connection:
    """A connection to the server."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


def request(method: str, path: str, body: bytes | None = None) -> bytes:
    """A request as it goes over the wire, on a connection that is kept."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def post(path: str, document: Any) -> bytes:
    """A request with a JSON body."""
    return request("POST", path, json.dumps(document).encode())


def run(work: Awaitable[Result]) -> Result:
    """Run to the end in an event loop of its own; no collection of what is loaded disturbs the times."""
    gc.freeze()

    async def wait() -> Result:
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(wait())


async def raw_exchange(host: str, port: int, data: bytes, seconds: float) -> bytes | None:
    """Send bytes that may be no HTTP, say that no more will come, and read to the end; None where that is late."""
    received = bytearray()
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(data)
                with suppress(OSError):
                    writer.write_eof()
                    while piece := await reader.read(65536):
                        received += piece
            finally:
                writer.transport.abort()
    except TimeoutError:
        return None
    return bytes(received)
