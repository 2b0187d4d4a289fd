"""Connections: the same bytes get the same answers however they are cut, and what is late or too much ends them."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from glint.server.http import connection as module
from glint.server.http.connection import WRITE_NOW, BoundedConnection

Result = TypeVar("Result")
RESET = struct.pack("ii", 1, 0)
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAA\r\n"
REQUESTS = (
    b"GET /a?b=c HTTP/1.1\r\nHost: h\r\n\r\n",
    b"POST /length HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /chunks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nT: v\r\n\r\n",
    b"POST /upgrade HTTP/1.1\r\nHost: h\r\n" + H2C + b"Content-Length: 5\r\n\r\nhello",
    b"POST /upgrade-chunks HTTP/1.1\r\n" + H2C + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HEAD /head HTTP/1.1\r\nHost: h\r\n\r\n",
    b"\r\nPOST /old HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello",
    b"GET /%61bsolute HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
)
STREAM = b"".join(REQUESTS)
ECHOES = [
    ("GET", "/a", "b=c", ""),
    ("POST", "/length", "", "hello"),
    ("POST", "/chunks", "", "hello"),
    ("POST", "/upgrade", "", "hello"),
    ("POST", "/upgrade-chunks", "", "hello"),
    ("POST", "/old", "", "hello"),
    ("GET", "/absolute", "", ""),
]


async def read_body(receive: Any) -> bytes:
    """The whole body of a request."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with what it was asked."""
    body = await read_body(receive)
    asked = [scope["method"], scope["path"], scope["query_string"].decode(), body.decode()]
    await reply(send, json.dumps(asked).encode() + b"\n")


async def reply(send: Any, body: bytes) -> None:
    """A whole answer."""
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Wire(asyncio.Transport):
    """A transport in memory that keeps what is written, in the place of a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.close()

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def pause_reading(self) -> None:
        """Whoever feeds it does not look."""

    def resume_reading(self) -> None:
        """Whoever feeds it does not look."""


def config_of(app: Any, **named: Any) -> Config:
    """Settings of uvicorn for an application."""
    config = Config(app=app, lifespan="off", log_level="critical", **named)
    config.load()
    return config


def answers_to(*pieces: bytes) -> bytes:
    """What is written for bytes that arrive piece by piece."""

    async def run() -> bytes:
        state = ServerState()
        connection, wire = BoundedConnection(config_of(echo), state, {}), Wire()
        connection.connection_made(wire)
        for piece in pieces:
            connection.data_received(piece)
            await asyncio.sleep(0)
        while state.tasks:
            await asyncio.sleep(0)
        assert wire.is_closing() and not state.tasks
        connection.connection_lost(None)
        return bytes(wire.written)

    return asyncio.run(run())


def test_pipelined_requests_are_answered_in_their_order() -> None:
    received = answers_to(STREAM)
    bodies = [tuple(json.loads(line)) for line in received.splitlines() if line.startswith(b"[")]
    assert bodies == ECHOES
    assert received.count(b"HTTP/1.1 200 OK\r\n") == len(REQUESTS)
    assert received.count(b"connection: keep-alive\r\n") == received.count(b"connection: close\r\n") == 1


def test_every_cut_in_two_gets_the_same_answers() -> None:
    whole = answers_to(STREAM)
    for cut in range(1, len(STREAM)):
        assert answers_to(STREAM[:cut], STREAM[cut:]) == whole, cut


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=60).map(sorted))
def test_any_cuts_get_the_same_answers(cuts: list[int]) -> None:
    pieces = [STREAM[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
    assert answers_to(*(piece for piece in pieces if piece)) == answers_to(STREAM)


def test_one_byte_at_a_time_gets_the_same_answers() -> None:
    assert answers_to(*(STREAM[at : at + 1] for at in range(len(STREAM)))) == answers_to(STREAM)


CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "bound_words"),
    [
        (b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 300, "256 lines"),
        (CHUNKED + b"0\r\n" + b"a:b\r\n" * 300, "256 lines"),
        (CHUNKED + b"0\r\na: " + b"b" * 70_000, "65536 bytes"),
        (CHUNKED + b"1" + b";a=b" * 20_000, "65536 bytes"),
        (CHUNKED + b"1\r\nx\r\n" * 20_000 + b"1;" + b"a" * 70_000, "65536 bytes"),
        (b"\r\n" * 40_000, "65536 bytes"),
    ],
)
def test_what_is_no_body_is_bounded(sent: bytes, bound_words: str) -> None:
    answer = answers_to(sent)
    assert answer.startswith(b"HTTP/1.1 431 ") and error_of(answer)["code"] == "headers_too_large"
    assert bound_words in error_of(answer)["message"]


class Listening:
    """A server of connections in this process, with the connections that it made."""

    def __init__(self, app: Any, **named: Any) -> None:
        self.made: list[BoundedConnection] = []
        self.state = ServerState()
        self._config = config_of(app, **named)
        self._server: asyncio.Server | None = None

    def _make(self) -> BoundedConnection:
        self.made.append(BoundedConnection(self._config, self.state, {}))
        return self.made[-1]

    async def __aenter__(self) -> Listening:
        self._server = await asyncio.get_running_loop().create_server(self._make, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *details: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self.made:
            connection.transport.abort()
        await self._server.wait_closed()

    async def connect(self, request: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client that has sent these bytes."""
        assert self._server is not None
        reader, writer = await asyncio.open_connection(*self._server.sockets[0].getsockname())
        writer.write(request)
        return reader, writer

    async def ask(self, request: bytes) -> bytes:
        """Everything that is answered until the connection ends."""
        reader, writer = await self.connect(request)
        received = await reader.read()
        writer.close()
        return received


def run(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run to the end, on the event loop that the server uses, or fail after half a minute."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work(), 30))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    while not condition():
        await asyncio.sleep(0.01)


@contextmanager
def bound(name: str, value: float) -> Iterator[None]:
    """Another bound for the time of a block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, value)
        yield


def error_of(answer: bytes) -> dict[str, Any]:
    """The error of an answer, which is JSON."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return dict(json.loads(body)["error"])


def test_a_connection_that_was_reset_waits_for_no_request() -> None:
    async def reset() -> None:
        async with Listening(echo) as server:
            reader, writer = await server.connect(REQUESTS[0])
            await reader.readuntil(b"]")
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
            await until(lambda: not server.state.connections)
            timers = [handle for handle in (server.made[0]._awaited_timer, server.made[0]._stall_timer) if handle]
            assert timers and all(handle.cancelled() for handle in timers)

    run(reset)


def test_a_crowd_is_refused_but_health_is_answered() -> None:
    async def crowd() -> None:
        async with Listening(echo, limit_concurrency=2) as server:
            _, idle = await server.connect()
            await until(lambda: len(server.made) == 1)
            for path in (b"/health", b"/ready"):
                answer = await server.ask(b"GET " + path + b" HTTP/1.1\r\nHost: h\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close\r\n" in answer
            answer = await server.ask(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer
            assert error_of(answer)["code"] == "too_many_connections"
            idle.close()
            await until(lambda: not server.state.connections)
            assert (await server.ask(REQUESTS[-1])).startswith(b"HTTP/1.1 200 ")

    run(crowd)


@pytest.mark.parametrize(
    ("sent", "bound_name", "part"),
    [
        (b"GET / HTTP/1.1\r\nHost", "HEADER_SECONDS", "head"),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\nhi", "REQUEST_SECONDS", "body"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nT: v\r\n", "REQUEST_SECONDS", "body"),
    ],
)
def test_a_request_that_is_late_is_refused(sent: bytes, bound_name: str, part: str) -> None:
    """However steadily the bytes come in."""

    async def trickle() -> bytes:
        async with Listening(echo) as server:
            reader, writer = await server.connect(sent)
            answer = asyncio.ensure_future(reader.read())
            while server.state.connections or not server.made:
                writer.write(b"a")
                await asyncio.sleep(0.05)
            return await answer

    with bound(bound_name, 0.5), bound("LINGER_SECONDS", 0.2):
        answer = run(trickle)
    assert answer.startswith(b"HTTP/1.1 408 ") and error_of(answer)["code"] == "request_timeout"
    assert part in error_of(answer)["message"]


def test_silence_ends_a_connection() -> None:
    async def silent() -> None:
        async with Listening(echo, timeout_keep_alive=1) as server:
            assert await server.ask(b"") == b""
            assert (await server.ask(REQUESTS[0])).count(b"HTTP/1.1 ") == 1

    with bound("HEADER_SECONDS", 0.3):
        run(silent)


class Held:
    """An application whose answers wait until they are let go; it counts the clients that left before."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun: list[str] = []
        self.left: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive)
        self.begun.append(scope["path"])
        leaving, going = asyncio.ensure_future(receive()), asyncio.ensure_future(self.go.wait())
        await asyncio.wait((leaving, going), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.append(scope["path"])
        else:
            await reply(send, scope["path"].encode())
        leaving.cancel()
        going.cancel()


FIRST = b"POST /first HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi"
SECOND = b"POST /second HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi"


@pytest.mark.parametrize(
    "behind", [b"", SECOND[:10], SECOND[:-1], SECOND, SECOND * 1000, b"\0garbage", b"x" * 10_000_000], ids=len
)
def test_whoever_leaves_is_noticed_whatever_it_sent_ahead(behind: bytes) -> None:
    async def leave() -> None:
        held = Held()
        async with Listening(held) as server:
            _, writer = await server.connect(FIRST + behind)
            await until(lambda: held.begun == ["/first"])
            writer.close()
            await until(lambda: held.left == ["/first"])
            await until(lambda: not server.state.tasks and not server.state.connections)
            assert held.begun == ["/first"]

    with bound("PIPELINE_SECONDS", 0.5):
        run(leave)


def test_what_is_sent_ahead_is_bounded() -> None:
    """Also in the number of requests: few of them are parsed before their turn."""

    async def ahead() -> None:
        held = Held()
        async with Listening(held) as server:
            reader, writer = await server.connect(FIRST + SECOND * 100_000)
            await until(lambda: bool(server.made) and server.made[0]._is_paused)
            assert len(server.made[0]._unread) < 1_000_000
            assert len(server.made[0]._exchanges) < 100
            held.go.set()
            received = b""
            while received.count(b"/second") < 1000:
                received += await reader.read(65536)
            writer.transport.abort()
            assert received.count(b"/first") == 1

    run(ahead)


def test_a_valid_request_before_garbage_is_answered_first() -> None:
    async def garbage() -> bytes:
        held = Held()
        async with Listening(held) as server:
            reader, writer = await server.connect(FIRST + b"\0garbage")
            await until(lambda: held.begun == ["/first"])
            await asyncio.sleep(0.1)
            held.go.set()
            received = await reader.read()
            writer.close()
            return received

    first, refusal = run(garbage).split(b"/first")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert refusal.startswith(b"HTTP/1.1 400 ") and b"connection: close\r\n" in refusal
    assert error_of(refusal)["code"] == "invalid_http"


def test_a_drain_answers_what_is_being_answered_and_nothing_else() -> None:
    async def drain() -> bytes:
        held = Held()
        async with Listening(held) as server:
            idle, idle_writer = await server.connect()
            reader, writer = await server.connect(FIRST + SECOND)
            await until(lambda: held.begun == ["/first"] and len(server.made) == 2)
            for connection in server.made:
                connection.shutdown()
            assert await idle.read() == b""
            idle_writer.close()
            held.go.set()
            received = await reader.read()
            await until(lambda: not server.state.connections and not server.state.tasks)
            writer.close()
            assert held.begun == ["/first"]
            return received

    received = run(drain)
    assert received.endswith(b"/first") and b"connection: close\r\n" in received


def test_a_drain_waits_for_the_rest_of_a_body() -> None:
    async def drain() -> bytes:
        async with Listening(echo) as server:
            reader, writer = await server.connect(FIRST[:-1])
            await until(lambda: bool(server.state.tasks))
            server.made[0].shutdown()
            writer.write(FIRST[-1:] + SECOND)
            return await reader.read()

    received = run(drain)
    assert received.endswith(b'["POST", "/first", "", "hi"]\n') and received.count(b"HTTP/1.1 ") == 1


def test_a_drain_that_takes_too_long_ends_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def cancel() -> None:
        held = Held()
        async with Listening(held) as server:
            reader, _ = await server.connect(FIRST)
            await until(lambda: held.begun == ["/first"])
            for task in server.state.tasks:
                task.cancel()
            assert await reader.read() == b""
            await until(lambda: not server.state.connections and not server.state.tasks)

    run(cancel)
    assert not caplog.records


async def stream(scope: Any, receive: Any, send: Any) -> None:
    """An application that streams, half of it past the queue."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"one ", "more_body": True})
    assert scope["extensions"][WRITE_NOW](b"two ")
    await send({"type": "http.response.body", "body": b"three"})


def test_streams_are_chunked_for_new_clients_and_ended_by_closing_for_old_ones() -> None:
    async def ask(version: bytes) -> bytes:
        async with Listening(stream) as server:
            return await server.ask(b"GET / HTTP/%b\r\nConnection: keep-alive\r\n\r\n%b" % (version, REQUESTS[-1]))

    old = run(lambda: ask(b"1.0"))
    assert old.endswith(b"\r\n\r\none two three") and b"transfer-encoding" not in old and old.count(b"HTTP/1.1 ") == 1
    new = run(lambda: ask(b"1.1"))
    assert new.count(b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n") == new.count(b"HTTP/1.1 200 ") == 2


def test_an_answer_before_the_end_of_its_request_closes_the_connection() -> None:
    async def early(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"early")

    async def ask() -> bytes:
        async with Listening(early) as server:
            reader, writer = await server.connect(b"POST / HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n")
            answer = asyncio.ensure_future(reader.read())
            while server.state.connections or not server.made:
                writer.write(b"x" * 10_000)
                await asyncio.sleep(0.01)
            return await answer

    with bound("LINGER_SECONDS", 0.5):
        answer = run(ask)
    assert answer.endswith(b"early") and b"connection: close\r\n" in answer


def broken(*messages: dict[str, Any]) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """An application that sends these messages and fails."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
        raise ValueError("secret")

    return app


HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}


def test_an_application_that_fails_is_answered_for_or_cut_off() -> None:
    async def ask(app: Any) -> bytes:
        async with Listening(app) as server:
            return await server.ask(REQUESTS[-1])

    answer = run(lambda: ask(broken()))
    assert answer.startswith(b"HTTP/1.1 500 ") and error_of(answer)["code"] == "internal_error"
    assert b"secret" not in answer
    begun = {"type": "http.response.body", "body": b"he", "more_body": True}
    answer = run(lambda: ask(broken(HEAD, begun)))
    assert answer.startswith(b"HTTP/1.1 200 ") and len(answer.partition(b"\r\n\r\n")[2]) < 5
    for body in (b"he", b"hello again"):
        answer = run(lambda body=body: ask(broken(HEAD, {"type": "http.response.body", "body": body})))
        assert answer.startswith(b"HTTP/1.1 500 ") and error_of(answer)["code"] == "internal_error"


def test_a_stream_says_that_it_begins_before_its_first_piece() -> None:
    """A body that has a length leaves with its head in one segment; a stream's head does not wait for its body."""
    piece = asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await piece.wait()
        await send({"type": "http.response.body", "body": b"late"})

    async def ask() -> bytes:
        async with Listening(stream) as server:
            reader, _ = await server.connect(REQUESTS[-1])
            head = await reader.readuntil(b"\r\n\r\n")
            piece.set()
            return head + await reader.read()

    assert run(ask).endswith(b"\r\n\r\n4\r\nlate\r\n0\r\n\r\n")


def test_a_client_that_asks_first_is_told_to_continue() -> None:
    async def ask() -> bytes:
        async with Listening(echo) as server:
            head = b"POST / HTTP/1.1\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
            reader, writer = await server.connect(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hi")
            return await reader.read()

    assert run(ask).endswith(b'["POST", "/", "", "hi"]\n')
