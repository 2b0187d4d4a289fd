"""Streams as a load: clients in a closed loop, or arrivals at a rate, from several processes; every answer with times.

The clocks of all processes of a machine agree, so their records can be put side by side.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.reliability.client import Line, post, run
from tests.reliability.mix import WORDS
from tests.reliability.options import Options, divide, spread
from tests.reliability.report import percentile
from tests.reliability.target import Target

PROMPT_WORDS = 12
WARM_SHARE = 0.2
MOST_SECONDS = 300.0


@dataclass(frozen=True)
class Job:
    """The share of one client process. `rate` is in requests per second; None is a closed loop of `clients`."""

    address: tuple[str, int]
    model: str
    output_tokens: int
    clients: int
    rate: float | None
    seconds: float
    seed: str


@dataclass(frozen=True)
class Sent:
    """One request: when, how it ended, and what came back."""

    started: float
    first: float | None
    last: float
    status: int | None
    ending: str
    tokens: int
    retry_after: str | None
    message: str

    @property
    def is_served(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and self.ending == "whole" and self.tokens > 0

    @property
    def is_refused(self) -> bool:
        """Whether it was refused because the queue was full."""
        return self.status == 429 and self.ending == "whole"


@dataclass(frozen=True)
class Share:
    """What one client process sent, and the time of its load."""

    began: float
    ended: float
    sent: list[Sent]


def do(job: Job) -> Share:
    """Put the load on in a loop of its own; the entry of a client process."""
    return run(_do(job))


async def _do(job: Job) -> Share:
    source = random.Random(job.seed)
    sent: list[Sent] = []
    began = time.perf_counter()
    end = began + job.seconds
    if job.rate is None:
        await asyncio.gather(*(_repeat(job, source, end, sent) for _ in range(job.clients)))
    else:
        await _arrive(job, source, end, sent)
    return Share(began, end, sent)


async def _repeat(job: Job, source: random.Random, end: float, sent: list[Sent]) -> None:
    line = Line(*job.address)
    await asyncio.sleep(source.random() * job.seconds * WARM_SHARE)
    while time.perf_counter() < end:
        sent.append(await _ask(job, line, source))
        if not sent[-1].is_served:
            await asyncio.sleep(0.05)
    line.close()


async def _arrive(job: Job, source: random.Random, end: float, sent: list[Sent]) -> None:
    assert job.rate is not None
    free: list[Line] = []
    tasks: set[asyncio.Task[None]] = set()
    due = time.perf_counter()

    async def one() -> None:
        line = free.pop() if free else Line(*job.address)
        sent.append(await _ask(job, line, source))
        free.append(line)

    while (due := due + source.expovariate(job.rate)) < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for line in free:
        line.close()


async def _ask(job: Job, line: Line, source: random.Random) -> Sent:
    answer = await line.exchange(stream_request(job, source), keeps_all=False, seconds=MOST_SECONDS)
    is_good = answer.status == 200
    message = "" if is_good else bytes(answer.body[:200]).decode("latin-1")
    tokens = answer.usage_tokens() if is_good else 0
    retry_after = answer.headers.get("retry-after")
    return Sent(answer.started, answer.first, answer.last, answer.status, answer.ending, tokens, retry_after, message)


def stream_request(job: Job, source: random.Random) -> bytes:
    """A greedy stream of exactly so many tokens."""
    body: dict[str, Any] = {
        "model": job.model,
        "prompt": " ".join(source.choices(WORDS, k=PROMPT_WORDS)),
        "max_tokens": job.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post("/v1/completions", body)


class Load:
    """The records of a load, and its figures over the time after the warm-up."""

    def __init__(self, shares: Sequence[Share]) -> None:
        began, self.end = max(share.began for share in shares), min(share.ended for share in shares)
        self.begin = began + (self.end - began) * WARM_SHARE
        self.sent = [one for share in shares for one in share.sent]
        self.served = [one for one in self.sent if one.is_served]
        self.refused = [one for one in self.sent if one.is_refused]
        self.failed = [one for one in self.sent if not one.is_served and not one.is_refused]

    @property
    def seconds(self) -> float:
        """The time that figures are taken over."""
        return self.end - self.begin

    def tokens_per_second(self) -> float:
        """Tokens that arrived within the time; those of an answer are taken as evenly spread over it."""
        return sum(one.tokens * self._share(one) for one in self.served) / self.seconds

    def requests_per_second(self) -> float:
        """Answers within the time, those at its ends in part."""
        return sum(map(self._share, self.served)) / self.seconds

    def _share(self, one: Sent) -> float:
        first = one.started if one.first is None else one.first
        inside = min(one.last, self.end) - max(first, self.begin)
        return max(0.0, inside) / max(one.last - first, 1e-9)

    def tpot_ms(self, percent: float) -> float:
        """Time per output token of served requests that began in the time, in milliseconds."""
        gaps = [(one.last - one.first) / (one.tokens - 1) for one in self._timed() if one.first and one.tokens > 1]
        return 1000 * (percentile(gaps, percent) or 0.0)

    def ttft_ms(self, percent: float) -> float:
        """Time to the first token of the same requests."""
        return 1000 * (percentile([one.first - one.started for one in self._timed() if one.first], percent) or 0.0)

    def refusal_ms(self, percent: float) -> float | None:
        """How long refusals took."""
        found = percentile([one.last - one.started for one in self.refused], percent)
        return None if found is None else 1000 * found

    def _timed(self) -> list[Sent]:
        inside = [one for one in self.served if one.started >= self.begin]
        return inside or self.served


def make_jobs(
    options: Options,
    target: Target,
    clients: int,
    seconds: float,
    tokens: int,
    rate: float | None = None,
    label: str = "",
) -> list[Job]:
    """A load cut into the client processes of the run."""
    processes = min(options.num_processes, clients)
    share = None if rate is None else rate / processes
    return [
        Job(target.address, target.model, tokens, part, share, seconds, f"{options.seed}/{label}/{index}")
        for index, part in enumerate(divide(clients, processes))
    ]


def put_load(
    options: Options,
    target: Target,
    clients: int,
    seconds: float,
    tokens: int,
    rate: float | None = None,
    label: str = "",
) -> Load:
    """Put a load on the server and wait for its end."""
    return Load(spread(do, make_jobs(options, target, clients, seconds, tokens, rate, label)))


@contextmanager
def load_beside(options: Options, target: Target, clients: int, seconds: float, tokens: int) -> Iterator[Future[Load]]:
    """A load while the block runs; gives the future of its figures."""
    with ThreadPoolExecutor(1) as thread:
        future: Future[Load] = thread.submit(put_load, options, target, clients, seconds, tokens)
        yield future


def output_tokens(target: Target, wanted: int) -> int:
    """The length of answers: as wanted, where the model has room for it."""
    return min(wanted, target.max_len // 2)
