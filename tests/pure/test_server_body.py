"""Bodies of clients that are not trusted: bounded in size, depth and time, and refused by the name of the field."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from glint.errors import RequestError
from glint.server.http.body import MAX_OUTER_STRINGS, check_structure, decode, read_json, shorten
from glint.server.http.problems import Problem, anthropic_body, problem_of, send_problem
from glint.server.limits import Limits

SMALL = Limits(body_bytes=100, body_depth=4, body_seconds=5.0)


class Part(msgspec.Struct, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "system"]
    content: str | list[Part] | None = None


class Body(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[ChatMessage]
    temperature: float | None = None
    n: int = 1
    bias: dict[str, float] = {}


class Client:
    """Plays messages to the server and counts how many were taken."""

    def __init__(self, *chunks: bytes | None, pause: float = 0.0, **headers: str | None) -> None:
        named = {"content_type": "application/json"} | headers
        encoded = [
            (name.replace("_", "-").encode(), value.encode()) for name, value in named.items() if value is not None
        ]
        self.scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": encoded}
        self.num_taken = 0
        self._chunks = self._play(chunks, pause)

    async def _play(self, chunks: tuple[bytes | None, ...], pause: float) -> AsyncIterator[Message]:
        for index, chunk in enumerate(chunks):
            await asyncio.sleep(pause)
            self.num_taken += 1
            if chunk is None:
                yield {"type": "http.disconnect"}
            else:
                yield {"type": "http.request", "body": chunk, "more_body": index + 1 < len(chunks)}

    async def receive(self) -> Message:
        return await anext(self._chunks)

    def send(self, limits: Limits = SMALL) -> bytes:
        return asyncio.run(read_json(self.scope, self.receive, limits))

    def refused(self, limits: Limits = SMALL) -> Problem:
        with pytest.raises(Problem) as caught:
            self.send(limits)
        return caught.value


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=UTF-8", "application/x+json"])
def test_a_body_arrives_whole(kind: str) -> None:
    headers = {"content_type": kind}
    assert Client(b'{"a"', b"", b":1}", **headers).send() == b'{"a":1}'
    assert Client(b" " * 98 + b"{}", **headers).send() == b" " * 98 + b"{}"
    assert Client(b" " * 98 + b"{}", content_length="100", **headers).send() == b" " * 98 + b"{}"


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        ";charset=utf-8",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "json",
        "application/json; charset=utf-16",
    ],
)
def test_other_content_types_are_refused_unread(kind: str | None) -> None:
    client = Client(b"{}", content_type=kind)
    problem = client.refused()
    assert (problem.status, client.num_taken) == (415, 0)
    assert (f"'{kind}'" if kind else "there is no content type") in problem.message
    assert "-H 'Content-Type: application/json'" in problem.message and problem.headers["Connection"] == "close"


def test_compressed_bodies_are_refused_unread() -> None:
    client = Client(b"{}", content_encoding="gzip")
    assert (client.refused().status, client.num_taken) == (415, 0)


def test_a_length_above_the_limit_is_refused_unread() -> None:
    for length in ("101", "9" * 50):
        client = Client(b"{}", content_length=length)
        problem = client.refused()
        assert (problem.status, client.num_taken) == (413, 0)
        assert "100 bytes" in problem.message and problem.headers["Connection"] == "close"


@pytest.mark.parametrize(
    "headers", [{}, {"content_length": "2"}, {"content_length": "-5"}, {"content_length": "\u00b2"}]
)
def test_reading_stops_at_the_limit_whatever_the_length_says(headers: dict[str, str]) -> None:
    client = Client(*[b"[" * 30] * 10, **headers)
    assert (client.refused().status, client.num_taken) == (413, 4)


def test_a_body_that_takes_too_long_is_refused() -> None:
    client = Client(*[b" "] * 50, pause=0.02)
    problem = client.refused(Limits(body_seconds=0.1))
    assert problem.status == 408 and "0.1 s" in problem.message and problem.headers["Connection"] == "close"
    assert client.num_taken < 50


def test_a_client_that_goes_is_noticed() -> None:
    with pytest.raises(ClientDisconnect):
        Client(b"{", None).send()


@pytest.mark.parametrize("raw", [b"", b"  \n", b'{"a":"\xff"}', b'{"\xed\xa0\x80":1}', b"[[[[[1]]]]]"])
def test_bodies_that_no_decoder_should_see(raw: bytes) -> None:
    assert Client(raw).refused().status == 400


def depth_of(value: Any) -> int:
    """The nesting of a decoded value, by recursion."""
    if isinstance(value, dict | list):
        return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
    return 0


TEXTS = st.text(alphabet='[]{}"\\/a\n\u00e9,:', max_size=12)
VALUES = st.recursive(
    st.none() | TEXTS | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_depth_is_that_of_the_decoded_value(value: Any, is_ascii: bool) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    depth = depth_of(json.loads(raw))
    check_structure(raw, depth, 10**6)
    if depth:
        with pytest.raises(Problem):
            check_structure(raw, depth - 1, 10**6)


@given(st.text(alphabet='[]{}"\\a,:1 ', max_size=60).map(str.encode) | st.binary(max_size=60))
def test_whatever_comes_is_decoded_or_refused(raw: bytes) -> None:
    try:
        check_structure(raw, 3, 10**6)
        value = decode(raw, object)
    except Problem as problem:
        assert problem.status == 400
    else:
        assert depth_of(value) <= 3


@pytest.mark.parametrize("raw", [b"[" * 60_000, b'{"a":' * 60_000, b"[" * 4_000_000 + b"]" * 4_000_000])
def test_deep_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(Problem, match="64 levels"):
        check_structure(raw, 64, 10**6)


def refused(raw: str | bytes) -> Problem:
    with pytest.raises(Problem) as caught:
        decode(raw.encode() if isinstance(raw, str) else raw, Body)
    assert caught.value.status == 400
    return caught.value


def test_a_good_body_is_decoded() -> None:
    body = decode(b'{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"temperature":0}', Body)
    assert body == Body([ChatMessage("user", [Part("hi")])], 0.0)


@pytest.mark.parametrize(
    ("raw", "param", "code", "words"),
    [
        ('{"messages":[],"foo":1}', "foo", "unknown_field", "'foo' is not supported; remove it"),
        ('{"messages":[{"role":"user","x":1}]}', "messages[0].x", "unknown_field", "'messages[0].x' is not supported"),
        ("{}", "messages", "missing_field", "'messages' is missing"),
        ('{"messages":[{"role":"user"},{}]}', "messages[1].role", "missing_field", "'messages[1].role' is missing"),
        (
            '{"messages":[{"role":"user"},{"role":"cat"}]}',
            "messages[1].role",
            "invalid_value",
            "invalid enum value 'cat'; use one of 'system', 'user'",
        ),
        ('{"messages":[],"temperature":"x"}', "temperature", "invalid_value", "expected number | null, got string"),
        ('{"messages":[],"n":1.5}', "n", "invalid_value", "expected integer, got number"),
        ('{"messages":[],"temperature":1e999}', "temperature", "invalid_value", "out of range"),
        ('{"messages":[],"bias":{"1":"a"}}', "bias[*]", "invalid_value", "expected number, got string"),
        (
            '{"messages":[{"role":"user","content":[{"type":"text","text":1}]}]}',
            "messages[0].content[0].text",
            "invalid_value",
            "expected string",
        ),
        (
            '{"messages":[{"role":"user","content":[{"type":"image"}]}]}',
            "messages[0].content[0].type",
            "invalid_value",
            "invalid value 'image'; use 'text'",
        ),
        ("[]", None, "invalid_value", "expected object, got array"),
        ('{"messages":[]', None, "invalid_json", "not valid JSON"),
        ('{"messages":[],"temperature":NaN}', None, "invalid_json", "not valid JSON"),
        ('{"messages":[],"temperature":Infinity}', None, "invalid_json", "not valid JSON"),
        ('{"messages":[],"temperature":-Infinity}', None, "invalid_json", "not valid JSON"),
        ('{"messages":[]} {}', None, "invalid_json", "not valid JSON"),
        ('{"messages":[{"role":"\\ud800 and more"}]}', None, "invalid_json", "not valid JSON"),
        (b'{"messages":[{"role":"\xff"}]}', None, "invalid_json", "UTF-8"),
    ],
)
def test_what_is_wrong_is_named(raw: str, param: str | None, code: str, words: str) -> None:
    problem = refused(raw)
    assert (problem.param, problem.code) == (param, code)
    assert words in problem.message


@pytest.mark.parametrize("raw", ['{"messages":[],"n":null}', '{"bias": null ,"messages":[],"other":\n null}'])
def test_a_field_that_is_null_is_not_there(raw: str) -> None:
    assert decode(raw.encode(), Body) == Body(messages=[])


@pytest.mark.parametrize(
    ("raw", "param", "code"),
    [
        ('{"messages":null}', "messages", "missing_field"),
        ('{"messages":[],"n":null,"other":0}', "other", "unknown_field"),
        ('{"messages":[{"role":null}],"n":null}', "messages[0].role", "invalid_value"),
        ('{"messages":[],"other":"null"}', "other", "unknown_field"),
        ("null", None, "invalid_value"),
    ],
)
def test_nulls_hide_no_error(raw: str, param: str | None, code: str) -> None:
    with pytest.raises(Problem) as refused:
        decode(raw.encode(), Body)
    assert (refused.value.param, refused.value.code) == (param, code)


@given(st.text(min_size=1, max_size=300))
def test_the_name_of_an_unknown_field_cannot_harm(name: str) -> None:
    if name in ("messages", "temperature", "n", "bias") or any("\ud800" <= char <= "\udfff" for char in name):
        return
    problem = refused(json.dumps({"messages": [], name: 1}))
    assert problem.code == "unknown_field" and len(problem.message) < 200
    assert problem.message.isprintable()
    assert json.loads(problem.openai_body)["error"]["param"] == problem.param


def test_problems_take_the_form_of_each_api() -> None:
    problem = Problem(429, "full", "queue_full", headers={"Retry-After": "3"})
    assert json.loads(problem.openai_body) == {
        "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    }
    assert json.loads(anthropic_body(problem, "msg_1")) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "full"},
        "request_id": "msg_1",
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_every_status_has_its_type(status: int, kind: str) -> None:
    assert Problem(status, "x", "x").type == kind


def test_internals_stay_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    problem = problem_of(KeyError("/secret/path"), "chatcmpl-7")
    assert problem.status == 500 and "chatcmpl-7" in problem.message
    assert b"secret" not in problem.openai_body + anthropic_body(problem)
    assert "/secret/path" in caplog.text and "chatcmpl-7" in caplog.text
    own = Problem(404, "no", "no")
    assert problem_of(own, "x") is own
    refusal = problem_of(RequestError("top_k is 3", "top_k"), "x")
    assert (refusal.status, refusal.message, refusal.param) == (400, "top_k is 3", "top_k")


def test_shown_text_is_printable_and_short() -> None:
    assert shorten("a\r\n\x1b[2J") == "a\ufffd\ufffd\ufffd[2J"
    assert shorten("b" * 1000) == "b" * 80 + " (cut)"


@contextmanager
def real_server(limits: Limits) -> Iterator[tuple[str, int]]:
    """A uvicorn process thread that reads a body and says how long it was."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_json(scope, receive, limits)
        except Problem as problem:
            await send_problem(send, scope["path"], problem)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
            await send({"type": "http.response.body", "body": b"%3d" % len(raw)})

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def exchange(address: tuple[str, int], head: str, *chunks: bytes) -> bytes:
    """Everything that the server sends until it closes the connection.

    Head and body go together: a body that arrives at a closed connection resets it, and the answer may be lost.
    """
    with socket.create_connection(address, timeout=10) as connection:
        start = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{head}\r\n\r\n".encode()
        connection.sendall(start + b"".join(chunks))
        answer = b""
        while received := connection.recv(65536):
            answer += received
        return answer


def test_over_a_socket_unread_bodies_end_the_connection() -> None:
    with real_server(Limits(body_bytes=1000, body_seconds=0.3)) as address:
        assert b" 413 " in exchange(address, "Content-Length: 5000000", b"x")
        assert b" 413 " in exchange(address, "Transfer-Encoding: chunked", b"7d0\r\n" + b"[" * 2000 + b"\r\n")
        assert b" 408 " in exchange(address, "Content-Length: 10", b"{")
        assert exchange(address, "Content-Length: 2\r\nConnection: close", b"{}").endswith(b"  2")


@pytest.mark.parametrize(("count", "is_refused"), [(1000, False), (1001, True)])
def test_a_body_of_too_many_parts_is_refused(count: int, is_refused: bool) -> None:
    raw = json.dumps([["[{"] for _ in range(count - 1)]).encode()
    if not is_refused:
        check_structure(raw, 64, 1000)
        return
    with pytest.raises(Problem, match="more than the 1000 objects and lists"):
        check_structure(raw, 64, 1000)


@pytest.mark.parametrize("value", ["1", "null", '{"a": "b"}'])
def test_a_body_of_too_many_fields_is_refused(value: str) -> None:
    def write(count: int) -> bytes:
        return ("{" + ", ".join(f'"\\"{name}": {value}' for name in range(count)) + "}").encode()

    check_structure(write(MAX_OUTER_STRINGS), 64, 10**6)
    check_structure(json.dumps({"prompt": ["a"] * 5000}).encode(), 64, 10**6)
    with pytest.raises(Problem, match=f"more than the {MAX_OUTER_STRINGS} names"):
        check_structure(write(MAX_OUTER_STRINGS + 1), 64, 10**6)
