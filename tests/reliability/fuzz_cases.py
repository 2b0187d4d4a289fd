"""Cases of the fuzzing, made from the strategies of tests/fuzz: a corpus is drawn once, its mutations by number."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.fuzz.hostile import ODD_BYTES, ODD_TEXTS, ODD_VALUES
from tests.reliability.client import Answer, request

MOST_BYTES = 300_000
MOST_DEPTH = 200
UNTOUCHED_SHARE = 0.35
ODD_HEADERS = (
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity, chunked",
    b"Transfer-Encoding : chunked",
    b"Content-Length: 0",
    b"Content-Length: 29",
    b"Content-Length: +5",
    b"Content-Length: 1e3",
    b"Expect: 100-continue",
    b"Connection: Upgrade, HTTP2-Settings",
    b"Upgrade: h2c",
    b"Upgrade: websocket",
    b"Connection: keep-alive, close",
    b"Host: evil",
    b"X-\x00: a",
    b"X: a\x0b\x0c",
    b" folded: line",
    b": no name",
    b"no colon",
    b"Content-Type: text/plain",
)
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
    b'8;a=b\r\n{"prompt\r\n15\r\n":"a","max_tokens":1}\r\n0\r\nX-Trailer: a\r\n\r\n'
)


@dataclass(frozen=True)
class Case:
    """A request over a kept connection; `may_expire` says that it may ask for a deadline that passes."""

    route: str
    message: bytes
    may_expire: bool = False


@dataclass(frozen=True)
class Corpus:
    """Bodies with their routes, and whole requests as bytes, all drawn from one seed."""

    seed: int
    bodies: tuple[tuple[str, bytes], ...]
    messages: tuple[bytes, ...]

    @classmethod
    def make(cls, seed: int, count: int) -> Corpus:
        """Draw the corpus; hypothesis must be there."""
        try:
            from tests.fuzz.routes import BODIES, make_cases
        except ModuleNotFoundError as missing:
            raise RuntimeError(f"fuzz needs the package {missing.name}; pip install hypothesis") from missing

        cases = make_cases(count, seed)
        bodies = [(case.route, case.message.partition(b"\r\n\r\n")[2]) for case in cases if case.route in BODIES]
        others = [case.message for case in cases if len(case.message) < MOST_BYTES]
        return cls(seed, tuple(one for one in bodies if len(one[1]) < MOST_BYTES), (*others, CHUNKED))

    def body(self, number: int) -> Case:
        """The body of this number: one of the corpus, most often mutated."""
        source = random.Random(f"{self.seed}/body/{number}")
        route, body = source.choice(self.bodies)
        if source.random() > UNTOUCHED_SHARE:
            for _ in range(source.choice((1, 1, 1, 2))):
                body = self._mutate(source, body)
        return Case(route, request("POST", route, body), b"deadline_seconds" in body)

    def stream(self, number: int) -> bytes:
        """The bytes of this number: a request or two, damaged in the head, the body or the frame."""
        source = random.Random(f"{self.seed}/stream/{number}")
        data = source.choice(self.messages) if source.random() < 0.8 else CHUNKED
        if source.random() < 0.15:
            data += source.choice(self.messages)
        for _ in range(source.choice((1, 1, 1, 2, 3))):
            data = _damage(source, data)
        return data

    def _mutate(self, source: random.Random, body: bytes) -> bytes:
        kind = source.randrange(6)
        if kind == 0:
            return _replace_bytes(source, body)
        if kind == 1:
            return body[: source.randrange(len(body) + 1)]
        if kind == 2:
            other = source.choice(self.bodies)[1]
            return body[: source.randrange(len(body) + 1)] + other[source.randrange(len(other) + 1) :]
        return _replace_value(source, body, source.choice(self.bodies)[1])


def _load(body: bytes) -> Any:
    if max(body.count(b"["), body.count(b"{")) > MOST_DEPTH:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return None


def _places(document: Any) -> list[tuple[Any, Any]]:
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    return [place for key in keys for place in [(document, key), *_places(document[key])]]


def _replace_value(source: random.Random, body: bytes, other: bytes) -> bytes:
    """Put an odd value, or one of another body, in a random place; or double or drop a key."""
    document, donor = _load(body), _load(other)
    places = _places(document)
    if not places:
        return _replace_bytes(source, body)
    holder, key = source.choice(places)
    kind = source.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and (found := _places(donor)):
        taken_from, taken = source.choice(found)
        holder[key] = taken_from[taken]
    elif kind == 2:
        holder[key] = source.choice(ODD_TEXTS)
    else:
        holder[key] = source.choice(ODD_VALUES)
    return json.dumps(document).encode()


def _replace_bytes(source: random.Random, data: bytes) -> bytes:
    first = source.randrange(len(data) + 1)
    last = min(len(data), first + source.choice((0, 0, 1, 1, 3, 20)))
    odd = source.choice((source.choice(ODD_BYTES), source.randbytes(source.randint(1, 4)), data[first:last] * 2))
    return data[:first] + odd + data[last:]


def _damage(source: random.Random, data: bytes) -> bytes:
    """Break a request as bytes: its lines, its frame, or anything."""
    kind = source.randrange(6)
    if kind == 0:
        return _replace_bytes(source, data)
    if kind == 1:
        return data[: source.randrange(len(data) + 1)]
    head, separator, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    place = source.randrange(len(lines) + 1)
    if kind == 2:
        lines.insert(max(1, place), source.choice(ODD_HEADERS))
    elif kind == 3 and lines:
        lines.append(lines[place % len(lines)])
    elif kind == 4 and lines:
        del lines[place % len(lines)]
    else:
        lines[0] = _replace_bytes(source, lines[0])
    return source.choice((b"\r\n",) * 9 + (b"\n",)).join(lines) + separator + body


def judge_body(case: Case, answer: Answer) -> list[str]:
    """What is wrong with an answer, by the rules of tests/fuzz/fuzz_routes.py and those of the connection."""
    from tests.fuzz.fuzz_routes import Reply, judge
    from tests.fuzz.routes import Case as Judged

    if answer.ending != "whole":
        return [f"the answer is {answer.ending} after {answer.seconds:.1f} s, status {answer.status}"]
    reply = Reply(answer.status, dict(answer.headers), answer.content())
    if answer.status == 503 and "retry-after" in answer.headers:
        return []
    return list(judge(Judged(case.route, b"", may_expire=case.may_expire), reply))


def judge_raw(received: bytes) -> list[str]:
    """What is wrong with what came back for raw bytes: anything but HTTP/1 answers that blame the client."""
    if not received:
        return []
    if not received.startswith(b"HTTP/1."):
        return [f"no HTTP: {received[:100]!r}"]
    words = received.split(b"\r\n", 1)[0].split(b" ")
    if len(words) < 2 or not words[1].isdigit():
        return [f"no status: {received[:100]!r}"]
    is_due = words[1] == b"504" or (words[1] == b"503" and b"retry-after" in received.lower())
    return [f"status {words[1].decode()}: {received[:300]!r}"] if int(words[1]) >= 500 and not is_due else []
