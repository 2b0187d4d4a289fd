"""Soak: mixed requests with cancellations and bad bodies, for a time or a number of tokens; then some again, alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.reliability import counts
from tests.reliability.client import Answer, Line, request, run
from tests.reliability.counts import Ended
from tests.reliability.mix import LENGTHS, LONG_LENGTHS, Ask, Mix, content_of, error_of
from tests.reliability.options import Options, divide, spread
from tests.reliability.report import MemoryTrend, PartReport
from tests.reliability.target import MemoryWatch, Target

NUM_REMEMBERED = 48
CHARS_PER_WORD = 6
PROMPT_SHARE = 0.35


@dataclass(frozen=True)
class Job:
    """The share of one client process; it ends after its seconds, or once it has its tokens."""

    address: tuple[str, int]
    model: str
    max_prompt_words: int
    lengths: tuple[int, ...]
    seed: str
    concurrency: int
    seconds: float
    tokens: int | None
    num_remembered: int


@dataclass
class Share:
    """What one client process saw."""

    ended: list[Ended] = field(default_factory=list)
    tokens: int = 0
    remembered: list[tuple[Ask, Any]] = field(default_factory=list)
    num_candidates: int = 0
    problems: list[str] = field(default_factory=list)


def do(job: Job) -> Share:
    """Send requests in a loop of its own; the entry of a client process."""
    return run(_do(job))


async def _do(job: Job) -> Share:
    share = Share()
    deadline = time.monotonic() + job.seconds

    async def client(index: int) -> None:
        source = random.Random(f"{job.seed}/{index}")
        mix = Mix(source, job.model, job.max_prompt_words, job.lengths)
        line = Line(*job.address)
        while time.monotonic() < deadline and (job.tokens is None or share.tokens < job.tokens):
            ask = mix.draw()
            answer = await line.exchange(
                request("POST", ask.path, ask.body), leaves_at=ask.leaves_at, leaves_after=ask.leaves_after
            )
            take(share, ask, answer, source, job.num_remembered)
        line.close()

    await asyncio.gather(*map(client, range(job.concurrency)))
    return share


def take(share: Share, ask: Ask, answer: Answer, source: random.Random, most: int) -> None:
    """Count how a request ended, and keep some answers of those that can be compared."""
    kind, problem, documents = judge(ask, answer)
    share.ended.append(Ended(kind, answer.request_id))
    if problem is not None:
        share.problems.append(f"{ask.path} {ask.body[:300]!r}: {problem}")
    if kind != "finished":
        return
    share.tokens += answer.usage_tokens()
    if ask.is_remembered:
        share.num_candidates += 1
        kept = (ask, content_of(documents))
        if len(share.remembered) < most:
            share.remembered.append(kept)
        elif (place := source.randrange(share.num_candidates)) < most:
            share.remembered[place] = kept


def judge(ask: Ask, answer: Answer) -> tuple[counts.Kind, str | None, list[Any]]:
    """How a request ended for its client, what is wrong with that, and the documents of the answer."""
    if answer.ending == "left":
        return "cancelled", None, []
    if answer.ending != "whole":
        return "failed", f"the answer is {answer.ending} after {answer.num_bytes} bytes, status {answer.status}", []
    if answer.status is None or answer.status >= 500:
        return "failed", f"status {answer.status}: {answer.content()[:200]!r}", []
    if answer.status >= 400:
        problem = None if ask.is_bad or answer.status == 429 else f"refused: {answer.content()[:300]!r}"
        return "refused", problem, []
    if ask.is_bad:
        return "finished", "a bad body was served", []
    documents = answer.documents()
    error = error_of(documents)
    if error is not None:
        return "failed", error, []
    return "finished", schema_problem(ask, documents), documents


def schema_problem(ask: Ask, documents: list[Any]) -> str | None:
    """Why an answer under a schema does not fit it; one that was cut short is not judged."""
    if not ask.has_schema:
        return None
    content = content_of(documents)
    ends = [value for name, value in content.items() if name.endswith(("finish_reason", "stop_reason", ".status"))]
    if not set(ends) <= {"stop", "end_turn", "completed"}:
        return None
    texts = [value for name, value in content.items() if name.endswith((".text", ".content"))]
    for text in texts:
        try:
            fits = set(json.loads(text)) == {"colour", "is_warm"}
        except ValueError:
            fits = False
        if not fits:
            return f"the answer does not fit its schema: {text[:200]!r}"
    return None


async def ask_alone(target: Target, remembered: list[tuple[Ask, Any]]) -> list[str]:
    """Send requests again, one after the other; what differs."""
    line = Line(*target.address)
    wrong = []
    for ask, before in remembered:
        answer = await line.exchange(request("POST", ask.path, ask.body))
        after = content_of(answer.documents()) if answer.status == 200 else answer.status
        if after != before:
            wrong.append(f"{ask.path} {ask.body[:400]!r}\n  was {before}\n  is {after}")
    line.close()
    return wrong


def soak(options: Options) -> PartReport:
    """Run the part."""
    num_clients = int(options.pick("concurrency", 24, 256))
    report = PartReport("soak", "")
    with options.server("soak", "--max-num-queued-reqs", str(2 * num_clients + 16)) as target:
        jobs = make_jobs(options, target, num_clients)
        before = target.wait_idle()
        num_lines = len(target.outcome_lines() or ())
        began = time.monotonic()
        with MemoryWatch(target) as watch:
            shares = spread(do, jobs)
        taken = time.monotonic() - began
        after = target.wait_idle()
        time.sleep(0.5)
        lines = target.outcome_lines()
        lines = None if lines is None else lines[num_lines:]
        remembered = [one for share in shares for one in share.remembered]
        wrong = run(ask_alone(target, remembered))
        if target.served is not None:
            traces = target.served.log.read_text().count("Traceback")
            report.promise("no traceback in the log", traces == 0, traces)
    report.did = (
        f"{num_clients} clients in {len(jobs)} processes sent chat, completions, messages and responses for "
        f"{taken:.0f} s: streamed and whole; greedy, seeded and free; penalties, log-probabilities, JSON schemas, stop "
        f"strings, shared prefixes; clients that leave, and bad bodies."
    )
    tell(report, shares, before, after, lines, taken)
    report.problems += wrong
    is_so = not wrong and len(remembered) == NUM_REMEMBERED
    report.promise(f"{NUM_REMEMBERED} answers equal alone, bit for bit", is_so, len(remembered) - len(wrong))
    if options.tokens is not None:
        report.promise(f"{options.tokens:,} tokens in all", sum(share.tokens for share in shares) >= options.tokens)
    MemoryTrend.of(watch.samples).tell(report, options.memory_bound_mib)
    return report


def make_jobs(options: Options, target: Target, num_clients: int) -> list[Job]:
    """The soak cut into the client processes of the run."""
    seconds = options.pick("seconds", 15, 600) if options.tokens is None else options.pick("seconds", 1800, 7200)
    words = int(target.max_len * PROMPT_SHARE) // CHARS_PER_WORD
    lengths = LENGTHS if options.short else LONG_LENGTHS
    processes = min(options.num_processes, num_clients)
    tokens = None if options.tokens is None else -(-options.tokens // processes)
    sizes = zip(divide(num_clients, processes), divide(NUM_REMEMBERED, processes), strict=True)
    return [
        Job(
            address=target.address,
            model=target.model,
            max_prompt_words=words,
            lengths=lengths,
            seed=f"{options.seed}/{index}",
            concurrency=clients,
            seconds=seconds,
            tokens=tokens,
            num_remembered=num_remembered,
        )
        for index, (clients, num_remembered) in enumerate(sizes)
    ]


def tell(
    report: PartReport,
    shares: list[Share],
    before: dict[str, Any],
    after: dict[str, Any],
    lines: list[dict[str, str]] | None,
    taken: float,
) -> None:
    """Add the counts, the load and what was wrong."""
    ended = [one for share in shares for one in share.ended]
    by_outcome = before["requests_by_outcome"]
    metrics = {name: after["requests_by_outcome"][name] - count for name, count in by_outcome.items()}
    counts.tell(report, ended, lines, metrics)
    generated = after["generated_tokens"] - before["generated_tokens"]
    table = report.table("load", "figure", "value")
    table.add("requests", len(ended))
    table.add("requests per second", len(ended) / taken)
    table.add("generated tokens", generated)
    table.add("tokens of whole answers", sum(share.tokens for share in shares))
    table.add("generated tokens per second", generated / taken)
    table.add("preemptions", after["preemptions"] - before["preemptions"])
    report.figures |= {"seconds": taken, "requests": len(ended), "generated_tokens": generated}
    problems = [problem for share in shares for problem in share.problems]
    report.problems += problems
    report.promise("no answer is wrong", not problems, len(problems))
    report.promise("no page is held afterwards", after["pages"]["held"] == 0)
