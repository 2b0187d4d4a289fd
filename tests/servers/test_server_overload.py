"""More than the queue holds: what fits is served, the rest is refused at once, and nothing hangs."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.raw_http import check_all_free, outcomes_since
from tests.e2e.served import Served, served

RUNNING = 4
WAITING = 8
WAITING_TOKENS = 400
TOKENS = 24


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a short queue."""
    flags = (
        *("--max-num-seqs", str(RUNNING)),
        *("--max-num-queued-reqs", str(WAITING)),
        *("--max-queued-tokens", str(WAITING_TOKENS)),
    )
    with served(tmp_path_factory.mktemp("bounded") / "server.log", *flags) as running:
        yield running


@dataclass(frozen=True)
class Ended:
    """How one request of many ended."""

    status: int
    seconds: float
    retry_after: str | None
    num_tokens: int
    code: str | None


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Ended:
    """Send one request and read its answer, streamed or not."""
    began = time.monotonic()
    answer = await client.post(path, json=body)
    seconds = time.monotonic() - began
    if answer.status_code != 200:
        return Ended(answer.status_code, seconds, answer.headers.get("retry-after"), 0, answer.json()["error"]["code"])
    if path == "/tokenize":
        return Ended(200, seconds, None, answer.json()["count"], None)
    if body["stream"]:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        return Ended(200, seconds, None, sum(len(event.get("token_ids", ())) for event in events), None)
    return Ended(200, seconds, None, len(answer.json()["choices"][0]["token_ids"]), None)


def ask_all(server: Served, bodies: list[dict[str, Any]], path: str = "/generate") -> list[Ended]:
    """Send all requests at once."""

    async def run() -> list[Ended]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=180, limits=limits) as client:
            return await asyncio.gather(*(ask(client, path, body) for body in bodies))

    return asyncio.run(run())


def body_of(index: int, prompt_tokens: int = 10) -> dict[str, Any]:
    """A request with a prompt of its own and a fixed number of tokens to write."""
    prompt = [100 + index] * prompt_tokens
    return {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": index % 2 == 0}


def check_refusals(ended: list[Ended]) -> None:
    """Every request was served whole or refused at once with the time to wait."""
    assert set(Counter(one.status for one in ended)) == {200, 429}
    for one in ended:
        if one.status == 200:
            assert one.num_tokens == TOKENS
        else:
            assert one.code == "queue_full" and one.retry_after is not None
            assert 1 <= int(one.retry_after) <= 60
    slowest = max(one.seconds for one in ended if one.status == 200)
    refused = sorted(one.seconds for one in ended if one.status == 429)
    assert refused[-1] < slowest


def test_four_times_the_queue_at_once(bounded: Served) -> None:
    bounded.wait_idle()
    before = len(bounded.outcome_lines())
    count = 4 * (RUNNING + WAITING)
    ended = ask_all(bounded, [body_of(index) for index in range(count)])
    check_refusals(ended)
    num_served = sum(one.status == 200 for one in ended)
    assert WAITING <= num_served < count
    outcomes = Counter(line["outcome"] for line in outcomes_since(bounded, before, count))
    assert outcomes == {"length": num_served, "refused": count - num_served}
    check_all_free(bounded)
    (after,) = ask_all(bounded, [body_of(0)])
    assert after.status == 200


def test_the_queue_is_bounded_in_tokens(bounded: Served) -> None:
    bounded.wait_idle()
    ended = ask_all(bounded, [body_of(index, WAITING_TOKENS // 2) for index in range(RUNNING + WAITING)])
    check_refusals(ended)
    check_all_free(bounded)


def test_what_no_queue_could_hold_is_a_wrong_request(bounded: Served) -> None:
    (longer,) = ask_all(bounded, [body_of(1, WAITING_TOKENS + 1)])
    (wider,) = ask_all(bounded, [body_of(1) | {"n": WAITING + 1}])
    assert (longer.status, longer.code) == (wider.status, wider.code) == (400, "request_exceeds_queue")
    check_all_free(bounded)


@pytest.mark.parametrize(("path", "status"), [("/generate", 400), ("/tokenize", 200)])
def test_prompts_that_are_still_being_read_count_as_well(bounded: Served, path: str, status: int) -> None:
    bounded.wait_idle()
    prompt = {"prompt": "a b c d e f g h " * 10_000}
    body = prompt if path == "/tokenize" else body_of(0) | prompt
    ended = ask_all(bounded, [body] * (4 * WAITING), path)
    refused = sorted(one.seconds for one in ended if one.status == 429)
    assert {one.status for one in ended} == {status, 429} and len(refused) >= 2 * WAITING
    assert refused[len(refused) // 2] < max(one.seconds for one in ended if one.status == status)
    check_all_free(bounded)


def test_a_full_queue_reads_nothing(bounded: Served) -> None:
    """What is wrong with a body is not looked for while the queue is full, and is told when it is not."""
    wrong = b'{"prompt": '

    async def run() -> tuple[httpx.Response, httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(base_url=bounded.url, timeout=180, limits=limits) as client:
            asking = []
            long = body_of(0) | {"max_tokens": 2000, "stream": True}
            while (await client.get("/stats")).json()["requests_waiting"] < WAITING:
                asking.append(asyncio.create_task(client.post("/generate", json=long)))
                await asyncio.sleep(0.05)
            refused = await client.post("/generate", content=wrong, headers=headers)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            while (await client.get("/stats")).json()["requests_waiting"]:
                await asyncio.sleep(0.02)
            return refused, await client.post("/generate", content=wrong, headers=headers)

    full, empty = asyncio.run(run())
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "invalid_json")
