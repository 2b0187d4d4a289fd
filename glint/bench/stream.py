"""A light HTTP/1.1 client for streamed answers: one connection, one request at a time, one timestamp per read.

It shares the processor with the server that it measures, so the chunk of a token is found by a search for its text and
only the other chunks are decoded as JSON.
"""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

from glint.errors import RequestError

TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning|arguments)"\s*:\s*"[^"]')
MORE_THAN_TEXT = re.compile(rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"')
LONGEST_MESSAGE = 200


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and the key it asks for."""

    url: str
    host: str
    port: int
    is_encrypted: bool
    prefix: str
    api_key: str | None = field(repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> "Endpoint":
        """Reads a base URL such as http://127.0.0.1:8000; a final /v1 is dropped, as every route adds its own."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
            raise RequestError(f"'{url}' is no base URL; give one such as http://127.0.0.1:8000")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise RequestError("the API key holds characters that no HTTP header can carry; check it for line ends")
        is_encrypted = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(url, host, port or (443 if is_encrypted else 80), is_encrypted, prefix, api_key)

    def message(self, method: str, path: str, body: bytes | None) -> bytes:
        """The bytes of one HTTP request."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {name}:{self.port}", "Accept: */*"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@dataclass(slots=True)
class StreamedAnswer:
    """The answer to one streamed request, with times in seconds of `perf_counter`.

    `text_times` has one time per chunk that carries text; `last` is the time of the last chunk with text or with a
    finish reason. Token counts are those of the server's usage. An answer that neither finished nor failed was cut.
    """

    started: float | None = None
    text_times: list[float] = field(default_factory=list)
    last: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    is_finished: bool = False
    failure: str | None = None

    def take_line(self, line: bytes, now: float) -> None:
        """Takes one line of an event stream."""
        if not line.startswith(b"data:"):
            return
        if TEXT.search(line) is not None:
            self.text_times.append(now)
            self.last = now
            if MORE_THAN_TEXT.search(line) is None:
                return
        self._take_rare(line[5:].strip(), now)

    def _take_rare(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.failure = f"a chunk is no JSON: {data[:LONGEST_MESSAGE]!r}"
            return
        if not isinstance(event, dict) or event.get("error"):
            self.failure = f"error in the stream: {error_message(data)}"
            return
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.output_tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            if choice.get("finish_reason") is not None:
                self.is_finished = True
                self.last = now


@dataclass(frozen=True)
class Reply:
    """A whole answer of a server: its status and its body."""

    status: int
    body: bytes

    def document(self) -> Any:
        """The body as JSON, None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def error_message(body: bytes) -> str:
    """The message in an error body of any of the servers, else the beginning of the body, on one line."""
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:LONGEST_MESSAGE] or "no message"


class Wire(asyncio.Protocol):
    """The bytes of one connection: reads answers whose body is chunked, of a given length, or ends with the connection.

    Lines of an event stream go to `take_line` with the time of the read that completed them, any other body is
    collected.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_open = False
        self.has_answered = False
        self._done: asyncio.Future[Reply] | None = None
        self._take_line: Callable[[bytes, float], None] | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def connection_lost(self, problem: Exception | None) -> None:
        """Ends the answer that was under way."""
        self.is_open = False
        if self._done is None or self._done.done():
            return
        if problem is None and self._read == self._read_to_the_end:
            self._finish()
        else:
            self._done.set_exception(ConnectionError("the server closed the connection before the answer was complete"))

    def send(self, message: bytes, take_line: Callable[[bytes, float], None] | None) -> asyncio.Future[Reply]:
        """Writes a request; the future holds the reply once it is complete. One request at a time."""
        assert self.transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._take_line = take_line
        self._buffer, self._line = b"", b""
        self._read = self._read_head
        self._collected: list[bytes] = []
        self._is_stream, self._is_kept, self.has_answered = False, True, False
        self.transport.write(message)
        return self._done

    def data_received(self, data: bytes) -> None:
        """Reads as far as the bytes go."""
        now = perf_counter()
        self.has_answered = True
        self._buffer = self._buffer + data if self._buffer else data
        try:
            while self._done is not None and not self._done.done() and self._read(now):
                pass
        except (ValueError, IndexError):
            if self._done is not None:
                self._done.set_exception(ConnectionError("the server's answer is no HTTP/1.1"))
            self.close()

    def close(self) -> None:
        """Drops the connection at once."""
        self.is_open = False
        if self.transport is not None:
            self.transport.abort()

    def _read_head(self, now: float) -> bool:
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return False
        self._buffer = rest
        first, *lines = head.decode("latin-1").split("\r\n")
        if not first.startswith("HTTP/1."):
            raise ValueError(first)
        self._status = int(first.split(" ")[1])
        if 100 <= self._status < 200:
            return True
        fields = {name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(":") for x in lines)}
        self._is_kept = fields.get("connection") != "close" and not first.startswith("HTTP/1.0")
        self._is_stream = self._status == 200 and fields.get("content-type", "").startswith("text/event-stream")
        if "chunked" in fields.get("transfer-encoding", ""):
            self._read = self._read_chunks
        elif "content-length" in fields:
            self._left = int(fields["content-length"])
            self._read = self._read_length
        else:
            self._read = self._read_to_the_end
        return True

    def _read_chunks(self, now: float) -> bool:
        buffer, start = self._buffer, 0
        while (line_end := buffer.find(b"\r\n", start)) >= 0:
            size = int(buffer[start:line_end].partition(b";")[0], 16)
            if size == 0:
                if buffer.find(b"\r\n\r\n", line_end) < 0:
                    break
                self._finish()
                return False
            chunk_end = line_end + 2 + size
            if len(buffer) < chunk_end + 2:
                break
            self._take(buffer[line_end + 2 : chunk_end], now)
            start = chunk_end + 2
        self._buffer = buffer[start:]
        return False

    def _read_length(self, now: float) -> bool:
        part, self._buffer = self._buffer[: self._left], b""
        self._left -= len(part)
        self._take(part, now)
        if self._left == 0:
            self._finish()
        return False

    def _read_to_the_end(self, now: float) -> bool:
        part, self._buffer = self._buffer, b""
        self._is_kept = False
        self._take(part, now)
        return False

    def _take(self, part: bytes, now: float) -> None:
        if not self._is_stream or self._take_line is None:
            self._collected.append(part)
            return
        *lines, self._line = (self._line + part).split(b"\n")
        for line in lines:
            self._take_line(line, now)

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(Reply(self._status, b"".join(self._collected)))
        if not self._is_kept:
            self.close()


class Link:
    """A way to an endpoint: one connection at a time, opened when it is needed.

    Each streamed request has a connection of its own: some servers close one after a stream without saying so, and a
    request written meanwhile is lost for seconds.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._wire: Wire | None = None

    async def call(self, method: str, path: str, document: Any = None) -> Reply:
        """Sends JSON, if any, and gives the whole reply; OSError when no reply comes."""
        body = None if document is None else json.dumps(document).encode()
        return await self._exchange(self._endpoint.message(method, path, body), None)

    async def stream(self, path: str, body: bytes, answer: StreamedAnswer) -> None:
        """Sends a request and fills `answer` while the stream runs; a failure is written into it, not raised.

        The time starts when the connection is open and the request is written.
        """
        message = self._endpoint.message("POST", path, body)
        try:
            reply = await self._exchange(message, answer)
        except OSError as problem:
            answer.failure = answer.failure or connection_problem(problem)
            self.close()
            return
        self.close()
        if reply.status != 200:
            answer.failure = f"HTTP {reply.status}: {error_message(reply.body)}"
        elif reply.body:
            answer.failure = f"the answer is no event stream: {error_message(reply.body)}"
        elif not answer.is_finished:
            answer.failure = answer.failure or "the stream ended without a finish reason"

    async def _exchange(self, message: bytes, answer: StreamedAnswer | None) -> Reply:
        is_fresh = self._wire is None or not self._wire.is_open
        wire = await self._connect() if is_fresh or self._wire is None else self._wire
        if answer is not None:
            answer.started = perf_counter()
        try:
            return await wire.send(message, None if answer is None else answer.take_line)
        except ConnectionError:
            if is_fresh or wire.has_answered:
                raise
            self.close()
            return await self._exchange(message, answer)

    async def _connect(self) -> Wire:
        loop = asyncio.get_running_loop()
        where = self._endpoint
        _, self._wire = await loop.create_connection(Wire, where.host, where.port, ssl=where.is_encrypted or None)
        return self._wire

    def close(self) -> None:
        """Drops the connection; a request under way on it is given up, which servers take as cancelled."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def connection_problem(problem: OSError) -> str:
    """One line on why a connection failed."""
    if isinstance(problem, ConnectionRefusedError) or "Connect call failed" in str(problem):
        return "connection refused"
    return str(problem) or type(problem).__name__
