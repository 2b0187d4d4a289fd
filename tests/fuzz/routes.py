"""The cases of the server's fuzzing: a request for every route, whole or broken, as the bytes that go over the wire."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from glint.server.anthropic.messages import MessagesBody, PromptBody
from glint.server.glint_api import DetokenizeBody, GenerateBody, TokenizeBody
from glint.server.openai.chat import ChatBody
from glint.server.openai.completions import TextBody
from glint.server.openai.responses import ResponsesBody
from tests.fuzz.bodies import bodies_of, constrained, damaged, encode
from tests.fuzz.hostile import ODD_TEXTS

BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": TextBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": PromptBody,
    "/generate": GenerateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
CONSTRAINED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
WATCHED = ("/v1/models", "/version", "/tokenizer_info", "/metrics", "/stats", "/requests", "/health", "/ready")
MODEL_NAMES = ("fuzzed", "other", "%00", "a/b", "%ff%fe", "..%2f..%2fetc", "%F0%9F%98%80", "a" * 5000)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "FOO")
SMALL = b'{"prompt":"a","max_tokens":1}'


@dataclass(frozen=True)
class Case:
    """What goes over the wire. `is_cut` is a request that never gets complete, so that no answer need come.

    `may_expire` says that the body may ask for a deadline that passes.
    """

    route: str
    message: bytes
    is_cut: bool = False
    may_expire: bool = False


def make_cases(count: int, seed_number: int) -> list[Case]:
    """About as many cases as asked for, in equal parts of every kind; the same for the same seed."""
    kinds = all_kinds()
    cases = [case for kind in kinds for case in draw_cases(kind, -(-count // len(kinds)), seed_number)]
    random.Random(seed_number).shuffle(cases)
    return cases


def all_kinds() -> list[st.SearchStrategy[Case]]:
    """Bodies of every route, valid and broken, hostile grammars, broken HTTP, and the routes without a body."""
    return [
        *(body_case(path, bodies_of(body).map(encode)) for path, body in BODIES.items()),
        *(body_case(path, damaged(bodies_of(body))) for path, body in BODIES.items()),
        *(body_case(path, constrained(path).map(encode)) for path in CONSTRAINED),
        watched_case(),
        odd_envelope(),
        raw_case(),
    ]


def draw_cases(kind: st.SearchStrategy[Case], count: int, seed_number: int) -> list[Case]:
    """Cases of one kind, fewer where it has no more that differ."""
    cases: list[Case] = []

    @seed(seed_number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(kind)
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


def message_of(method: str, path: str, body: bytes | None = None, *headers: str) -> bytes:
    """A request that asks for the connection to be closed after its answer."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
        if not any(header.lower().startswith("content-type") for header in headers):
            lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + (body or b"")


def body_case(path: str, bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[Case]:
    """A whole request with one of the bodies."""
    return bodies.map(lambda raw: Case(path, message_of("POST", path, raw), may_expire=b"deadline_seconds" in raw))


@st.composite
def watched_case(draw: st.DrawFn) -> Case:
    """A route without a body, by any method, with odd queries and odd names of models."""
    path = draw(st.sampled_from(WATCHED))
    if path == "/v1/models" and draw(st.booleans()):
        path = f"/v1/models/{draw(st.sampled_from(MODEL_NAMES))}"
    query = draw(st.sampled_from(["", "", "?a=b", "?%00", "?" + "x" * 2000, "?a[]=1&a[]=2"]))
    body = draw(st.none() | st.just(SMALL))
    return Case(path, message_of(draw(st.sampled_from(["GET", "GET", "GET", *METHODS])), path + query, body))


@st.composite
def odd_envelope(draw: st.DrawFn) -> Case:
    """A small body under a wrong method, path, type, encoding or length."""
    path = draw(st.sampled_from(list(BODIES)))
    kind = draw(st.sampled_from(["method", "path", "type", "encoding", "header", "chunked", "expect"]))
    if kind == "method":
        return Case(path, message_of(draw(st.sampled_from(METHODS)), path, draw(st.none() | st.just(SMALL))))
    if kind == "path":
        odd = draw(st.sampled_from(["/", "//", "/.", "%00", "%2f", ";a", "/../stats", "?" + "a" * 3000, "é"]))
        return Case(path + odd, message_of("POST", path + odd, SMALL))
    if kind == "chunked":
        sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        chunks, rest = [], SMALL
        for size in [*sizes, len(SMALL)]:
            chunks.append(rest[:size])
            rest = rest[size:]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk) + b"0\r\n\r\n"
        return Case(path, message_of("POST", path, None, "Transfer-Encoding: chunked") + framed)
    headers = {
        "type": ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "", "a" * 999],
        "encoding": ["gzip", "br", "identity, gzip", "\x01"],
        "header": ["a" * 30_000, *ODD_TEXTS[5:8]],
        "expect": ["100-continue", "nonsense"],
    }[kind]
    name = {"type": "Content-Type", "encoding": "Content-Encoding", "header": "X-Odd", "expect": "Expect"}[kind]
    return Case(path, message_of("POST", path, SMALL, f"{name}: {draw(st.sampled_from(headers))}"))


def raw_case() -> st.SearchStrategy[Case]:
    """Bytes that are no HTTP, or the beginning of it."""
    start = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
    fixed = [
        b"",
        b"\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET  /health  HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET http://localhost/stats HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /stats HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        start + b"Content-Length: -1\r\n\r\n" + SMALL,
        start + b"Content-Length: 99999999999999999999\r\n\r\n" + SMALL,
        start + b"Content-Length: 5000000000\r\n\r\n" + SMALL,
        start + b"Content-Length: abc\r\n\r\n" + SMALL,
        start + b"Content-Length: 29\r\nContent-Length: 3\r\n\r\n" + SMALL,
        start + b"Content-Length: 29\r\nTransfer-Encoding: chunked\r\n\r\n" + SMALL,
        start + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        start + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        start + b"Bad Header\r\n\r\n",
        start + b"X: a\r\n b\r\n\r\n",
        start + b"X-Null: a\0b\r\n\r\n",
        start + b"X" * 200_000,
        start + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        start + b"".join(b"X%d: a\r\n" % index for index in range(20_000)) + b"\r\n",
    ]
    short = st.integers(0, len(SMALL) - 1).map(
        lambda size: start + b"Content-Type: application/json\r\nContent-Length: 29\r\n\r\n" + SMALL[:size]
    )
    return (st.sampled_from(fixed) | short | st.binary(max_size=60)).map(lambda raw: Case("raw", raw, is_cut=True))
