"""Sends thousands of valid and broken requests to every route of a running server and judges every answer.

Run it from the root of the repository: `python -m tests.fuzz.fuzz_routes --url http://127.0.0.1:8000 --seed 1 --cases
2000`. The server must be served under the name "fuzzed". No answer may be a 5xx but those that are documented, none may
be late, every refusal must say what is wrong, and afterwards the server must answer as it did before.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.fuzz.bodies import MODEL
from tests.fuzz.routes import BODIES, Case, make_cases

CASE_SECONDS = 120.0
CONCURRENCY = 12
LONGEST_SHOWN = 1500
INTERNALS = re.compile(rb'Traceback|File "|site-packages|\.py\b|0x[0-9a-f]{8}|<class |object at ')
NAMED_BESIDES_FIELDS = ("body", "the field ", "the prompt", "schema", "pattern", "grammar", "message", "tool")
NO_HTTP = "invalid_http"


@dataclass(frozen=True)
class Reply:
    """An answer as it came; `status` is None where the server closed the connection without one."""

    status: int | None
    headers: dict[str, str]
    body: bytes

    @property
    def request_id(self) -> str | None:
        """The id that the log knows the request by."""
        return self.headers.get("x-request-id") or self.headers.get("request-id")


@dataclass
class Tally:
    """What a run of many cases gave. `missing_ids` counts requests whose id no answer told."""

    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    missing_ids: int = 0
    slowest: tuple[float, str] = (0.0, "")


def parse_reply(data: bytes) -> Reply:
    """Take an answer apart; raises ValueError where it is no HTTP/1.1."""
    if not data:
        return Reply(None, {}, b"")
    while True:
        head, separator, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if not separator or not first.startswith("HTTP/1.1 "):
            raise ValueError(f"no HTTP/1.1 answer: {data[:80]!r}")
        status = int(first.split(" ")[1])
        if status != 100:
            break
        data = body
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Reply(status, headers, dechunk(body) if headers.get("transfer-encoding") == "chunked" else body)


def dechunk(data: bytes) -> bytes:
    """The content of a chunked body; raises ValueError where the last chunk is missing."""
    parts = []
    while True:
        line, separator, data = data.partition(b"\r\n")
        if not separator:
            raise ValueError("a chunked answer was cut")
        size = int(line, 16)
        if size == 0:
            return b"".join(parts)
        parts.append(data[:size])
        data = data[size + 2 :]


async def exchange(host: str, port: int, case: Case) -> Reply:
    """Send a case on a connection of its own and read to the end."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(case.message)
        if case.is_cut:
            writer.write_eof()
        return parse_reply(await reader.read(-1))
    except OSError:
        if case.is_cut:
            return Reply(None, {}, b"")
        raise
    finally:
        writer.transport.abort()


def judge(case: Case, reply: Reply) -> Iterator[str]:
    """What is wrong with an answer."""
    if reply.status is None:
        if not case.is_cut:
            yield "no answer"
        return
    if INTERNALS.search(reply.body) is not None and reply.status != 200:
        yield "the answer shows internals"
    if reply.status == 200:
        yield from judge_stream(case, reply)
        return
    if reply.status >= 500:
        if reply.status != 504 or not case.may_expire:
            yield f"status {reply.status}"
    elif reply.status == 400 and case.route in BODIES:
        yield from judge_refusal(case, reply)


def judge_refusal(case: Case, reply: Reply) -> Iterator[str]:
    """A refusal is JSON whose message names what is wrong, unless the request was no HTTP at all."""
    try:
        error = json.loads(reply.body)["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        yield "the refusal has no message"
        return
    if error.get("code") == NO_HTTP:
        return
    names = [*BODIES[case.route].__struct_fields__, *NAMED_BESIDES_FIELDS]
    if error.get("param") is None and not any(name in message for name in names):
        yield f"the refusal names nothing: {message!r}"
    if len(message) > LONGEST_SHOWN:
        yield f"the refusal has {len(message)} characters"


def judge_stream(case: Case, reply: Reply) -> Iterator[str]:
    """A stream is made of JSON events; only a deadline, or a grammar that is too much, may end it by an error."""
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        return
    for line in reply.body.split(b"\n"):
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        try:
            event: Any = json.loads(line[6:])
        except ValueError:
            yield f"an event is no JSON: {line[:200]!r}"
            return
        error = event.get("error") or (event.get("response") or {}).get("error")
        is_expected = case.may_expire and "not done within" in str(error)
        if error and not is_expected and "the grammar of the request" not in str(error):
            yield f"the stream ended by {error}"


async def run_case(host: str, port: int, index: int, case: Case, tally: Tally) -> None:
    """Send one case and note what is wrong with its answer."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(CASE_SECONDS):
            reply = await exchange(host, port, case)
        problems = list(judge(case, reply))
    except TimeoutError:
        reply, problems = Reply(None, {}, b""), [f"no answer within {CASE_SECONDS:g} s"]
    except (OSError, ValueError) as problem:
        reply, problems = Reply(None, {}, b""), [f"{type(problem).__name__}: {problem}"]
    tally.slowest = max(tally.slowest, (time.monotonic() - started, f"case {index} {case.route}"))
    tally.statuses[f"{case.route[:30]} {reply.status}"] += 1
    if reply.request_id is not None:
        tally.request_ids.append(reply.request_id)
    elif case.is_cut:
        tally.missing_ids += 1
    for problem in problems:
        shown = case.message[:LONGEST_SHOWN]
        tally.problems.append(f"case {index} {case.route}: {problem}\n  sent {shown!r}\n  got {reply.body[:400]!r}")


async def send_all(host: str, port: int, cases: list[Case]) -> Tally:
    """Send all cases, several at once."""
    tally = Tally()
    left = iter(enumerate(cases))

    async def work() -> None:
        for index, case in left:
            await run_case(host, port, index, case, tally)

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return tally


def reference_tokens(url: str) -> list[int]:
    """A greedy answer whose tokens must be the same before and after."""
    body = {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/generate", json=body, timeout=CASE_SECONDS)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def fuzz(url: str, cases: list[Case]) -> Tally:
    """Send the cases; the tally's problems also say whether the server was harmed."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    models = httpx.get(f"{url}/v1/models", timeout=CASE_SECONDS).json()
    assert MODEL in [entry["id"] for entry in models["data"]], f"serve the model with --served-model-name {MODEL}"
    before = reference_tokens(url)
    tally = asyncio.run(send_all(parts.hostname, parts.port, cases))
    health = httpx.get(f"{url}/health", timeout=CASE_SECONDS)
    if health.status_code != 200:
        tally.problems.append(f"/health says {health.status_code}: {health.text}")
    if reference_tokens(url) != before:
        tally.problems.append("a greedy answer has other tokens than before")
    return tally


def main() -> int:
    """Run from the command line; the exit code is 1 where something is wrong."""
    parser = argparse.ArgumentParser(description="fuzz every route of a running server")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--only", type=int, help="send this one of the cases")
    chosen = parser.parse_args()
    cases = make_cases(chosen.cases, chosen.seed)
    started = time.monotonic()
    tally = fuzz(chosen.url, cases if chosen.only is None else [cases[chosen.only]])
    print(f"{tally.statuses.total()} cases, seed {chosen.seed}, {time.monotonic() - started:.0f} s")
    for status, count in sorted(tally.statuses.items()):
        print(f"{count:8} {status}")
    print(f"slowest: {tally.slowest[0]:.1f} s, {tally.slowest[1]}")
    for problem in tally.problems:
        print(problem, file=sys.stderr)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
