"""Fuzz: mutated bodies for every route over kept connections, and mutated requests as raw bytes; all by one seed.

A case is made from the seed and its number alone, so that one can be sent again by its number.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.reliability.client import Line, raw_exchange, request, run
from tests.reliability.fuzz_cases import Corpus, judge_body, judge_raw
from tests.reliability.options import Options, divide, spread
from tests.reliability.report import MemoryTrend, PartReport, percentile
from tests.reliability.target import KNOWN, MemoryWatch, Target

MODEL = "fuzzed"
CHECK_EVERY = 1000
CASE_SECONDS = 60.0
CLIENTS = 32
SHOWN = 600
NO_ID = '"-"'


@dataclass(frozen=True)
class Job:
    """The cases of one client process: every `step`-th from `first` on, below `bodies` and `streams`."""

    address: tuple[str, int]
    corpus: Corpus
    first: int
    step: int
    bodies: int
    streams: int
    clients: int
    known: list[int]


@dataclass
class Share:
    """What one client process saw."""

    statuses: Counter[str] = field(default_factory=Counter)
    request_ids: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_known: int = 0


def do(job: Job) -> Share:
    """Send the cases in a loop of its own; the entry of a client process."""
    return run(_do(job))


async def _do(job: Job) -> Share:
    share = Share()
    bodies = iter(range(job.first, job.bodies, job.step))
    streams = iter(range(job.first, job.streams, job.step))

    async def send_bodies() -> None:
        line = Line(*job.address)
        for number in bodies:
            await send_body(job, line, number, share)
            if number // job.step % max(1, CHECK_EVERY // job.step) == 0:
                await check_known(job, share)
        line.close()

    async def send_streams() -> None:
        for number in streams:
            await send_stream(job, number, share)
            if number // job.step % max(1, CHECK_EVERY // job.step) == 0:
                await check_known(job, share)

    await asyncio.gather(*(send_bodies() for _ in range(job.clients)))
    await asyncio.gather(*(send_streams() for _ in range(job.clients)))
    return share


async def send_body(job: Job, line: Line, number: int, share: Share) -> None:
    """Send one body and judge its answer."""
    case = job.corpus.body(number)
    answer = await line.exchange(case.message, seconds=CASE_SECONDS)
    share.seconds.append(answer.seconds)
    share.statuses[f"{case.route} {answer.status}"] += 1
    if answer.request_id is not None:
        share.request_ids.append(answer.request_id)
    for problem in judge_body(case, answer):
        share.problems.append(f"body {number} {case.route}: {problem}: sent {case.message[:SHOWN]!r}")


async def send_stream(job: Job, number: int, share: Share) -> None:
    """Send one stream of bytes on a connection of its own and judge what comes."""
    data = job.corpus.stream(number)
    try:
        received = await raw_exchange(*job.address, data, CASE_SECONDS)
        problems = ["the connection is still open"] if received is None else judge_raw(received)
    except OSError as problem:
        received, problems = b"", [f"no connection: {problem}"]
    first = (received or b"").split(b"\r\n", 1)[0].split(b" ")
    share.statuses[f"bytes {first[1].decode('latin-1') if len(first) > 1 else 'closed'}"] += 1
    share.problems += [f"stream {number}: {problem}: sent {data[:SHOWN]!r}" for problem in problems]


async def check_known(job: Job, share: Share) -> None:
    """The known request still has its answer."""
    line = Line(*job.address)
    answer = await line.exchange(request("POST", "/generate", json.dumps(KNOWN).encode()), seconds=CASE_SECONDS)
    line.close()
    share.num_known += 1
    if answer.request_id is not None:
        share.request_ids.append(answer.request_id)
    tokens = answer.documents()[0]["choices"][0]["token_ids"] if answer.status == 200 else None
    if tokens != job.known:
        share.problems.append(f"the known request gives {tokens} with status {answer.status}, before {job.known}")


def fuzz(options: Options) -> PartReport:
    """Run the part."""
    num_bodies, num_streams = int(options.pick("bodies", 3000, 100_000)), int(options.pick("streams", 800, 20_000))
    clients = int(options.pick("concurrency", CLIENTS, CLIENTS * 2))
    flags = ("--served-model-name", MODEL, "--max-model-len", "256", "--max-num-queued-reqs", str(16 * clients))
    corpus = Corpus.make(options.seed, 300 if options.short else 1500)
    with options.server("fuzz", *flags) as target:
        if options.only is not None:
            return show_one(options, corpus, target)
        before = target.wait_idle()
        known = target.known_answer()
        assert known is not None, "the known request is not answered"
        processes = options.num_processes
        jobs = [
            Job(target.address, corpus, index, processes, num_bodies, num_streams, share, known)
            for index, share in enumerate(divide(max(clients, processes), processes))
        ]
        began = time.monotonic()
        with MemoryWatch(target) as watch:
            shares = spread(do, jobs)
        taken = time.monotonic() - began
        after = target.wait_idle()
        time.sleep(0.5)
        report = PartReport("fuzz", told(options, num_bodies, num_streams, processes, taken))
        report.promise("the known answer is the same afterwards", target.known_answer() == known)
        tell(report, shares, num_bodies, num_streams, taken)
        tell_lines(report, target, shares, before["requests_by_outcome"], after["requests_by_outcome"])
        report.promise("no page is held afterwards", after["pages"]["held"] == 0)
    MemoryTrend.of(watch.samples).tell(report, options.memory_bound_mib)
    return report


def told(options: Options, num_bodies: int, num_streams: int, processes: int, taken: float) -> str:
    """What the part did."""
    return (
        f"{num_bodies:,} mutated bodies over all routes on kept connections, then {num_streams:,} mutated requests as "
        f"raw bytes, seed {options.seed}, {processes} client processes, {taken:.0f} s; a known request every "
        f"{CHECK_EVERY:,}."
    )


def tell(report: PartReport, shares: list[Share], num_bodies: int, num_streams: int, taken: float) -> None:
    """Add what came back."""
    statuses = sum((share.statuses for share in shares), Counter[str]())
    codes: Counter[str] = Counter()
    for name, count in statuses.items():
        kind = "streams" if name.startswith("bytes ") else "bodies"
        codes[f"{kind} {name.rpartition(' ')[2]}"] += count
    table = report.table("answers by status", "status", "bodies", "byte streams")
    for code in sorted({name.split()[1] for name in codes}):
        table.add(code, codes[f"bodies {code}"], codes[f"streams {code}"])
    seconds = [one for share in shares for one in share.seconds]
    figures = report.table("load", "figure", "value")
    figures.add("cases per second", statuses.total() / taken)
    figures.add("known requests", sum(share.num_known for share in shares))
    figures.add("slowest body, s", max(seconds, default=0.0))
    figures.add("body p99, ms", (percentile(seconds, 99) or 0.0) * 1000)
    problems = [problem for share in shares for problem in share.problems]
    report.problems += problems
    report.figures |= {"statuses": statuses, "seconds": taken, "slowest_seconds": max(seconds, default=0.0)}
    sent = (sum(codes[name] for name in codes if name.startswith("bodies")), num_streams)
    report.promise("all cases were sent", sent[0] == num_bodies and statuses.total() == num_bodies + num_streams)
    report.promise("no 5xx, no answer missing or late, every refusal says what is wrong", not problems, len(problems))


def tell_lines(
    report: PartReport, target: Target, shares: list[Share], before: dict[str, int], after: dict[str, int]
) -> None:
    """Every request that has an id has one line, and none of the lines says failed or lost.

    A request that is turned away at the door, for its Host or Origin, has no id.
    """
    failed = sum(after.get(name, 0) - before.get(name, 0) for name in ("failed", "lost"))
    report.promise("no request failed or was lost, by the metrics", failed == 0, failed)
    lines = target.outcome_lines()
    if lines is None or target.served is None:
        return
    written = Counter(line["request_id"] for line in lines if line["request_id"] != NO_ID)
    told_ids = [request_id for share in shares for request_id in share.request_ids]
    wrong = [f"{name} has {written[name]} lines" for name in told_ids if written[name] != 1]
    report.problems += [f"in the log: {line}" for line in lines if line["outcome"] in ("failed", "lost")]
    wrong += [f"{name} has {count} lines" for name, count in written.items() if count != 1 and name not in told_ids]
    report.problems += wrong
    report.promise("exactly one outcome line for each request", not wrong, len(told_ids))
    traces = target.served.log.read_text().count("Traceback")
    report.promise("no traceback in the log", traces == 0, traces)


def show_one(options: Options, corpus: Corpus, target: Target) -> PartReport:
    """Send one body by its number and show the answer."""
    assert options.only is not None
    case = corpus.body(options.only)
    answer = run(Line(*target.address).exchange(case.message, seconds=CASE_SECONDS))
    report = PartReport("fuzz", f"body {options.only}: {case.message!r}\nanswer {answer.status}: {answer.content()!r}")
    report.problems += judge_body(case, answer)
    report.promise("the answer is right", not report.problems)
    return report
