"""HTTP/1.1 under the application. It limits the bytes, lines and time of a client, and drops one that does not read.

The parser gets small pieces, and nothing while a request waits behind the one that is being answered. So a connection
keeps little more than `HEADER_BYTES` and one read of its socket, whatever a client sends.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from glint.server.http.origin import use_target_host
from glint.server.http.problems import Problem, send_problem

log = logging.getLogger("glint.server")
HEADER_SECONDS = 10.0
HEADER_BYTES = 64 * 1024
HEADER_LINES = 256
REQUEST_SECONDS = 40.0
STALL_SECONDS = 30.0
LINGER_SECONDS = 2.0
LINGER_BYTES = 16 * 2**20
PIPELINE_SECONDS = 5.0
PIECE_BYTES = 4096
WRITE_NOW = "glint.write_now"
ALWAYS_ANSWERED = ("/health", "/ready")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PHRASES = {status.value: status.phrase for status in HTTPStatus}
TLS_HANDSHAKE = 0x16
HTTP2_REASON = "Pause on PRI/Upgrade"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Exchange:
    """One request and its response, as `receive` and `send` of an application.

    It is over when the response is complete or the client has left; from then on it writes nothing.
    """

    def __init__(self, connection: "BoundedConnection", app: ASGIApp, scope: Scope, keeps_alive: bool) -> None:
        self.path = scope["path"]
        self.body = bytearray()
        self.keeps_alive = keeps_alive
        self.is_received = False
        self.is_over = False
        self.has_started = False
        self._connection = connection
        self._app = app
        self._scope: Scope = {**scope, "extensions": {WRITE_NOW: self.write_now}}
        self._is_http_10 = scope["http_version"] == "1.0"
        expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])
        self._waits_for_continue = expects and not self._is_http_10
        self._has_changed = asyncio.Event()
        self._is_read = False
        self._sends_body = scope["method"] != "HEAD"
        self._sends_chunks = False
        self._bytes_left: int | None = None
        self._head = b""

    async def run(self) -> None:
        """Run the application; where it fails, respond with an error or cut the response off."""
        scope, self._scope = self._scope, {}
        try:
            await self._app(scope, self.receive, self.send)
            if not self.is_over and not self._connection.transport.is_closing():
                raise RuntimeError("the application returned before its response was complete")
        except asyncio.CancelledError:
            self._connection.close()
        except Exception:
            log.exception("a request to %s failed inside the server", self.path)
            if self.has_started and not self._head:
                self._connection.close()
            else:
                self.has_started, self._head, self._bytes_left = False, b"", None
                await send_problem(self.send, self.path, Problem(500, "internal error", code="internal_error"))

    def leave(self) -> None:
        """End the exchange: the client has left, or will not get this response."""
        self.is_over = True
        self._has_changed.set()

    def add(self, body: bytes) -> None:
        """A piece of the body has arrived."""
        self.body += body
        self._has_changed.set()

    def complete(self) -> None:
        """The whole request has arrived."""
        self.is_received = True
        self._has_changed.set()

    async def receive(self) -> Message:
        """The next piece of the body; after the last one, wait until the exchange is over."""
        if self._waits_for_continue and not self.is_over:
            self._waits_for_continue = False
            self._connection.transport.write(CONTINUE)
        while not self.is_over:
            if self.body or (self.is_received and not self._is_read):
                message = {"type": "http.request", "body": bytes(self.body), "more_body": not self.is_received}
                self.body.clear()
                self._is_read = self.is_received
                self._connection.read_on()
                return message
            self._has_changed.clear()
            await self._has_changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Write the head or a piece of the response; waits while the client reads slowly."""
        if not self._connection.is_writable.is_set():
            await self._connection.is_writable.wait()
        if self.is_over or self._connection.transport.is_closing():
            return
        if (message["type"] == "http.response.start") == self.has_started:
            raise RuntimeError(f"the application sent {message['type']} out of turn")
        if not self.has_started:
            self._start(message["status"], message.get("headers", ()))
        else:
            self._write(message.get("body", b""), bool(message.get("more_body", False)))

    def write_now(self, events: bytes) -> bool:
        """Write a piece of a response that has begun; returns whether the client keeps up."""
        connection = self._connection
        if events and not self.is_over and not connection.transport.is_closing():
            connection.transport.write(self._take_head() + self._frame(events))
        return connection.is_writable.is_set()

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begin the response. For HTTP/1.0, which has no chunks, closing the connection ends a body without a length.

        The head is written with the first piece of the body. The head of a body without a length, which may take long,
        is written in the next turn of the event loop.
        """
        self._waits_for_continue = False
        self._sends_body = self._sends_body and status not in (204, 304)
        lines = [f"HTTP/1.1 {status} {PHRASES.get(status, '')}\r\n".encode()]
        for name, value in (*self._connection.default_headers, *headers):
            if _CONTROL.search(value):
                raise RuntimeError(f"the application sent a header {name!r} with a control character")
            if name == b"content-length":
                self._bytes_left = int(value) if self._sends_body else None
            elif name == b"connection":
                self.keeps_alive = self.keeps_alive and value != b"close"
                continue
            lines += name, b": ", value, b"\r\n"
        if self._sends_body and self._bytes_left is None:
            self._sends_chunks = not self._is_http_10
            self.keeps_alive = self.keeps_alive and self._sends_chunks
        if self._sends_chunks:
            lines.append(b"transfer-encoding: chunked\r\n")
        self.keeps_alive = self.keeps_alive and self.is_received
        if not self.keeps_alive:
            lines.append(b"connection: close\r\n")
        elif self._is_http_10:
            lines.append(b"connection: keep-alive\r\n")
        self.has_started = True
        self._head = b"".join((*lines, b"\r\n"))
        if self._bytes_left is None:
            self._connection.loop.call_soon(self._write_head)

    def _write_head(self) -> None:
        if self._head and not self._connection.transport.is_closing():
            self._connection.transport.write(self._take_head())

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def _write(self, body: bytes, has_more: bool) -> None:
        if self._bytes_left is not None:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (self._bytes_left > 0 and not has_more):
                raise RuntimeError("the application sent a body of another length than its Content-Length says")
        last = b"0\r\n\r\n" if self._sends_chunks and not has_more else b""
        self._connection.transport.write(self._take_head() + self._frame(body) + last)
        if not has_more:
            self.leave()
            self._connection.answered(self)

    def _frame(self, body: bytes) -> bytes:
        if self._sends_chunks:
            return b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return body if self._sends_body else b""


class BoundedConnection(asyncio.Protocol):
    """A connection of uvicorn's server. It answers requests in order; the first of `_exchanges` is the current one.

    - Between two bytes of body, and before the first, a client sends at most `HEADER_BYTES` bytes and `HEADER_LINES`
      headers, trailers included; the head of a request arrives within `HEADER_SECONDS`, the rest within
      `REQUEST_SECONDS`.
    - Bytes after the current request wait, beyond `HEADER_BYTES` in the kernel. Then the connection cannot notice that
      the client leaves, so it drops a client that sends so much ahead after `PIPELINE_SECONDS`.
    - A response that is complete before its request ends the connection. The client has `LINGER_SECONDS` to read it;
      up to `LINGER_BYTES` more that it sends are dropped.
    - A slow reader is waited for. A client that reads nothing of a full buffer for `STALL_SECONDS` is dropped.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.is_writable = asyncio.Event()
        self.is_writable.set()
        self._config = config
        self._server_state = server_state
        self._connections = cast(set[Any], server_state.connections)
        self.loop = _loop or asyncio.get_running_loop()
        self._parser = self._make_parser()
        self._exchanges: deque[Exchange] = deque()
        self._unread = bytearray()
        self._takes_requests = True
        self._is_paused = False
        self._is_closing = False
        self._awaited: str | None = None
        self._awaited_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._bytes_since_body = 0
        self._bytes_dropped = 0
        self._has_begun = True
        self._is_in_headers = False
        self._num_headers = 0
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []

    def _make_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of every response."""
        return self._server_state.default_headers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for the first request."""
        self.transport = cast(asyncio.Transport, transport)
        self._ends = {
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "client": _address(transport.get_extra_info("peername")),
            "server": _address(transport.get_extra_info("sockname")),
        }
        self._connections.add(self)
        self._await_next()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all exchanges: the client has left."""
        self._connections.discard(self)
        self._takes_requests = False
        self._is_closing = True
        for timer in (self._awaited_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        for exchange in self._exchanges:
            exchange.leave()
        self._exchanges.clear()
        self.is_writable.set()
        del self._parser

    def shutdown(self) -> None:
        """Finish the current response and close; uvicorn's server calls this when it drains."""
        if self._exchanges:
            self._exchanges[0].keeps_alive = False
        else:
            self.close()

    def data_received(self, data: bytes) -> None:
        """Add received bytes. After the last response they are dropped, and too many of them abort the connection."""
        if not self._is_closing:
            self._has_begun = True
            self._unread += data
            self.read_on()
            return
        self._bytes_dropped += len(data)
        if self._bytes_dropped > LINGER_BYTES:
            self.transport.abort()

    def read_on(self) -> None:
        """Feed the parser as far as it may read now; the rest waits here, and then in the kernel."""
        while self._unread and self._may_parse():
            piece = bytes(self._unread[:PIECE_BYTES])
            del self._unread[:PIECE_BYTES]
            self._bytes_since_body += len(piece)
            try:
                self._parse(piece)
                if self._bytes_since_body > HEADER_BYTES:
                    raise _too_large(f"{HEADER_BYTES} bytes")
            except Problem as problem:
                self._refuse(problem)
        if not self._is_closing:
            self._pause_or_resume(len(self._unread) > HEADER_BYTES)
            self._await_next()

    def _may_parse(self) -> bool:
        has_room = not self._exchanges or len(self._exchanges[0].body) < HEADER_BYTES
        return self._takes_requests and has_room and len(self._exchanges) < 2

    def _parse(self, piece: bytes) -> None:
        """Feed the parser. Where it takes the body for another protocol, feed it the same head without Upgrade."""
        while piece:
            try:
                return self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                piece = self._head_without_upgrade() + piece[upgrade.args[0] :]
                self._parser = self._make_parser()
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, Problem):
                    raise error.__context__ from None
                raise _not_http(str(error), piece) from None

    def _head_without_upgrade(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":
            raise Problem(400, "CONNECT is for proxies; use GET or POST", code="invalid_http")
        kept = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._target, version, b"".join(kept))

    def on_message_begin(self) -> None:
        """A request begins."""
        self._has_begun = self._is_in_headers = True
        self._num_headers = 0
        self._target = b""
        self._headers = []

    def on_url(self, target: bytes) -> None:
        """A piece of the request target."""
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; count a trailer and drop it."""
        self._num_headers += 1
        if self._num_headers > HEADER_LINES:
            raise _too_large(f"{HEADER_LINES} lines")
        if self._is_in_headers:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete: run the request, or queue it behind those before it."""
        self._is_in_headers = False
        if self._parser.should_upgrade():
            return
        use_target_host(self._target, self._headers)
        scope = self._scope()
        limit = self._config.limit_concurrency
        is_at_limit = limit is not None and len(self._connections) >= limit
        app = _refuse_connection if is_at_limit and scope["path"] not in ALWAYS_ANSWERED else self._config.loaded_app
        self._add(Exchange(self, app, scope, self._parser.should_keep_alive() and not is_at_limit))

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._bytes_since_body = 0
        self._exchanges[-1].add(body)

    def on_message_complete(self) -> None:
        """The request is complete. Another may follow on a connection that is kept alive."""
        if self._parser.should_upgrade():
            return
        self._has_begun = False
        self._bytes_since_body = 0
        self._takes_requests = self._takes_requests and self._exchanges[-1].keeps_alive
        self._exchanges[-1].complete()

    def _scope(self) -> Scope:
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Problem(400, f"HTTP/{version} is not spoken here; use HTTP/1.1", code="invalid_http")
        try:
            target = httptools.parse_url(self._target)
        except httptools.HttpParserInvalidURLError:
            raise Problem(400, "the target of the request is no valid URL", code="invalid_http") from None
        raw_path = target.path or b"/"
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode(),
            "path": unquote(raw_path.decode()),
            "raw_path": raw_path,
            "query_string": target.query or b"",
            "root_path": "",
            "headers": self._headers,
            **self._ends,
        }

    def _add(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._run(exchange)

    def _run(self, exchange: Exchange) -> None:
        tasks = self._server_state.tasks
        task = self.loop.create_task(exchange.run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _refuse(self, problem: Problem) -> None:
        """Respond with a problem after all complete requests, in place of an incomplete one, and close."""
        self._takes_requests = False
        if self._exchanges and not self._exchanges[-1].is_received:
            exchange = self._exchanges.pop()
            exchange.leave()
            if exchange.has_started:
                return self.close()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await send_problem(send, scope["path"], problem)

        scope = {"method": "", "path": "", "http_version": "1.1", "headers": []}
        self._add(Exchange(self, answer, scope, keeps_alive=False))
        return None

    def answered(self, exchange: Exchange) -> None:
        """A response is complete: run the next request, or close."""
        self._server_state.total_requests += 1
        if not exchange.keeps_alive:
            return self.close()
        self._exchanges.popleft()
        if self._exchanges:
            self._run(self._exchanges[0])
        return self.read_on()

    def close(self) -> None:
        """Close once all is written. A client that may still be sending first has a moment to read the response."""
        may_send = bool(self._unread) or not all(exchange.is_received for exchange in self._exchanges)
        self._takes_requests = False
        self._is_closing = True
        for exchange in self._exchanges:
            exchange.leave()
        self._exchanges.clear()
        self._unread.clear()
        if self.transport.get_write_buffer_size():
            self._await_reading()
        if may_send:
            self._pause_or_resume(False)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._await_next()
        else:
            self.transport.close()

    def _await_next(self) -> None:
        """Set a timer for what the client must do next. A timer that already runs for it is kept."""
        awaited, seconds = None, 0.0
        if self._is_closing:
            awaited, seconds = "end", LINGER_SECONDS
        elif not self._exchanges:
            is_idle = not self._has_begun
            awaited, seconds = ("begin", self._config.timeout_keep_alive) if is_idle else ("head", HEADER_SECONDS)
        elif not self._exchanges[0].is_received:
            awaited, seconds = "body", REQUEST_SECONDS
        elif self._is_paused:
            awaited, seconds = "answer", PIPELINE_SECONDS
        if awaited == self._awaited:
            return
        if self._awaited_timer is not None:
            self._awaited_timer.cancel()
        self._awaited = awaited
        self._awaited_timer = None if awaited is None else self.loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        if self._awaited == "body" or (self._awaited == "head" and self._bytes_since_body > 0):
            message = f"the {self._awaited} of the request did not arrive in time; send it faster"
            self._refuse(Problem(408, message, code="request_timeout"))
        elif self._awaited == "answer":
            self.transport.abort()
        else:
            self.close()

    def _pause_or_resume(self, is_full: bool) -> None:
        if is_full != self._is_paused and not self.transport.is_closing():
            self._is_paused = is_full
            (self.transport.pause_reading if is_full else self.transport.resume_reading)()

    def pause_writing(self) -> None:
        """The buffer is full: the client must read some of it soon."""
        self.is_writable.clear()
        self._await_reading()

    def resume_writing(self) -> None:
        """The client has read enough."""
        self.is_writable.set()
        if self._stall_timer is not None and not self._is_closing:
            self._stall_timer.cancel()

    def _await_reading(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self._check_reading, unread)

    def _check_reading(self, unread_before: int) -> None:
        if self.transport.get_write_buffer_size() < unread_before:
            self._await_reading()
        else:
            self.transport.abort()


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    message = "the server has as many connections as it may have; try again in a moment"
    await send_problem(send, scope["path"], Problem(503, message, "too_many_connections", headers={"Retry-After": "1"}))


def _too_large(bound: str) -> Problem:
    return Problem(431, f"the headers have more than {bound}; send less of them", code="headers_too_large")


def _not_http(reason: str, piece: bytes) -> Problem:
    if piece[0] == TLS_HANDSHAKE:
        reason = "it looks like TLS, which is not spoken here; use http://, or start the server with --ssl-certfile"
    elif reason == HTTP2_REASON:
        reason = "it is HTTP/2, which is not spoken here; use HTTP/1.1"
    return Problem(400, f"the request is not valid HTTP/1.1: {reason}", code="invalid_http")


def _address(info: Any) -> tuple[str, int] | None:
    return (str(info[0]), int(info[1])) if isinstance(info, tuple) else None
