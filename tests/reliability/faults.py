"""Faults: an engine that dies, fails or stops in every phase of a request; who is told what, when it serves again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reliability.client import Answer, Line, post, run
from tests.reliability.counts import kind_of
from tests.reliability.faulty_server import SHARES_GPU
from tests.reliability.mix import SCHEMA, error_of
from tests.reliability.options import Options
from tests.reliability.report import PartReport, Table
from tests.reliability.target import Target, is_alive

ROOT = Path(__file__).resolve().parents[2]
TEST_LIBRARY = ROOT / "build" / "libglint_cpu_test.so"
RANK_FAILED = "the fault that $GLINT_FAULT="
SERVER = "tests.reliability.faulty_server"
NUM_REQUESTS = 12
SLOTS = 4
STEP_TOKENS = 64
FAULT_STEPS = 60
HEALTH_SECONDS = 3.0
PHASE_SECONDS = 60.0
END_SECONDS = 30.0
STREAMED_BYTES = 4000
COLUMNS = ("fault", "place", "requests", "how they ended", "outcome lines", "ready after s", "known answer after s")
Phase = Callable[[dict[str, Any], list[Answer]], bool]


@dataclass(frozen=True)
class Fault:
    """What is done to the engine, and the phase of requests in which it is."""

    place: str
    what: str
    sig: int | None = None
    rank_fault: str | None = None
    child: int = 1
    prompt_share: float = 0.0
    is_constrained: bool = False
    spare_seconds: float = 0.0


FAULTS = (
    Fault("queue", "SIGKILL while requests wait", signal.SIGKILL),
    Fault("prefill", "SIGKILL before any first token", signal.SIGKILL, prompt_share=0.4),
    Fault("first token", "SIGSEGV at the first token", signal.SIGSEGV),
    Fault("sampling", "SIGKILL amid grammars, penalties, log-probabilities", signal.SIGKILL, is_constrained=True),
    Fault("streaming", "SIGSEGV mid-stream", signal.SIGSEGV),
    Fault("decode", "a rank fails in a step", rank_fault="step"),
    Fault("collective", "a rank fails in a collective", rank_fault="collective"),
    Fault("load", "SIGKILL, then a rank fails while the next engine loads", signal.SIGKILL, "load", child=2),
    Fault("stall", "SIGSTOP mid-stream", signal.SIGSTOP, spare_seconds=HEALTH_SECONDS),
)
IN_SHORT = ("queue", "streaming", "collective", "load", "stall")
PHASES: dict[str, Phase] = {
    "queue": lambda stats, answers: stats["requests_waiting"] > 0 and stats["requests_running"] > 0,
    "prefill": lambda stats, answers: stats["requests_running"] > 0 and not any(one.first for one in answers),
    "first token": lambda stats, answers: any(one.first for one in answers),
}


def has_streamed(stats: dict[str, Any], answers: list[Answer]) -> bool:
    """Some clients have read a good part of their streams."""
    return sum(one.num_bytes > STREAMED_BYTES and one.ending == "open" for one in answers) >= 2


@dataclass
class Outcome:
    """What a fault did to the requests, and how long the server was away."""

    ends: Counter[str]
    lines: Counter[str]
    wrong: list[str]
    ready_seconds: float | None
    known_seconds: float | None
    has_happened: bool = True


def faults(options: Options) -> PartReport:
    """Run the part."""
    report = PartReport(
        "faults",
        f"{NUM_REQUESTS} requests, half of them streamed, on {SLOTS} slots; the engine's process is struck in the "
        "named phase. Times count from the blow, for a rank fault from the first request that is told of it, and for "
        "two faults in a row from the second.",
    )
    if options.url is not None:
        report.promise("not run: the server at --url is not ours to break", None)
        return report
    table = report.table("faults", *COLUMNS)
    for fault in FAULTS:
        if options.short and fault.place not in IN_SHORT:
            continue
        if options.fault_places and fault.place not in options.fault_places:
            continue
        library = options.fault_library or TEST_LIBRARY
        if fault.rank_fault is not None and not library.is_file():
            report.promise(f"{fault.place}: not run, {library.name} is not there (scripts/build.sh --tests)", None)
            continue
        with options.server(f"fault {fault.place}", *flags_of(fault), **given_of(options, fault, library)) as target:
            bound = options.ready_seconds + fault.spare_seconds
            tell(report, table, fault, run(strike(target, fault, bound)), bound)
    return report


def flags_of(fault: Fault) -> tuple[str, ...]:
    """Few slots, so that requests wait, and short steps, so that prompts take several."""
    sizes = ("--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(STEP_TOKENS))
    return (*sizes, "--health-timeout", f"{HEALTH_SECONDS:g}") if fault.place == "stall" else sizes


def given_of(options: Options, fault: Fault, library: Path) -> dict[str, Any]:
    """The test build and its environment, for a fault of a rank."""
    if fault.rank_fault is None:
        return {"is_struck": True}
    layers = json.loads((options.model / "config.json").read_text())["num_hidden_layers"]
    passes = {"load": 1, "step": FAULT_STEPS, "collective": FAULT_STEPS * (2 * layers + 1)}[fault.rank_fault]
    rank = min(1, options.fault_ranks - 1)
    environment = {"GLINT_FAULT": f"{fault.rank_fault}:{rank}:{passes}", "GLINT_FAULT_CHILD": str(fault.child)}
    if options.fault_ranks_share_gpu:
        environment[SHARES_GPU] = "1"
    last = ("--engine", str(library), "--tp", str(options.fault_ranks))
    return {"environment": environment, "module": SERVER, "last_flags": last, "is_struck": True}


def bodies(target: Target, fault: Fault) -> list[tuple[str, dict[str, Any]]]:
    """The requests that are open at the fault."""
    words = "word " * int(target.max_len * fault.prompt_share / target.tokens_of("word ")) + "Once upon a time"
    made = []
    for index in range(NUM_REQUESTS):
        body: dict[str, Any] = {"prompt": f"{index} {words}", "max_tokens": target.max_len // 3, "ignore_eos": True}
        if fault.is_constrained:
            body |= {"logprobs": 5, "repetition_penalty": 1.1, "temperature": 0.7, "seed": index}
            if index % 2:
                body |= {"structured_outputs": {"json": {"type": "array", "items": SCHEMA}}, "ignore_eos": False}
        made.append(("/generate", body | {"stream": index % 2 == 0}))
    return made


async def strike(target: Target, fault: Fault, bound: float) -> Outcome:
    """Send the requests, wait for the phase, strike, and see what becomes of everything."""
    known = await asyncio.to_thread(target.known_answer)
    made = bodies(target, fault)
    await asyncio.sleep(0.5)
    num_before = len(target.outcome_lines() or ())
    lines = [Line(*target.address) for _ in range(NUM_REQUESTS)]
    asked = [
        asyncio.create_task(line.exchange(post(path, body), seconds=PHASE_SECONDS + END_SECONDS))
        for line, (path, body) in zip(lines, made, strict=True)
    ]
    is_by_itself = fault.sig is None
    if is_by_itself:
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=PHASE_SECONDS)
    else:
        await wait_for_phase(target, PHASES.get(fault.place, has_streamed), lines)
    struck, engine = time.monotonic(), target.engine_pid
    if fault.sig is not None:
        os.kill(engine, fault.sig)
    done, late = await asyncio.wait(asked, timeout=END_SECONDS)
    for task in late:
        task.cancel()
    answers = [task.result() for task in done]
    if fault.child > 1:
        struck = await wait_for_rank_fault(target)
    ready, right = await wait_for_service(target, known, struck, 2 * bound)
    await asyncio.sleep(1.0)
    written = (target.outcome_lines() or [])[num_before:]
    outcome = judge(answers, len(late), written, ready, right)
    outcome.has_happened = has_happened(target, fault, engine)
    return outcome


async def wait_for_rank_fault(target: Target) -> float:
    """When the log said that the rank has failed which fails in a later engine."""
    deadline = time.monotonic() + PHASE_SECONDS
    while time.monotonic() < deadline:
        if has_rank_failed(target):
            return time.monotonic()
        await asyncio.sleep(0.02)
    raise RuntimeError(f"no rank failed within {PHASE_SECONDS:g} s")


def has_rank_failed(target: Target) -> bool:
    """Whether the log names the fault."""
    assert target.served is not None
    return RANK_FAILED in target.served.log.read_text()


def has_happened(target: Target, fault: Fault, engine: int) -> bool:
    """Whether the process that was struck is gone, and the rank that was to fail has failed."""
    is_gone = fault.sig is None or not is_alive(engine)
    return is_gone and (fault.rank_fault is None or has_rank_failed(target))


async def wait_for_phase(target: Target, phase: Phase, lines: list[Line]) -> None:
    """Wait until the requests are where the fault shall find them."""
    deadline = time.monotonic() + PHASE_SECONDS
    while time.monotonic() < deadline:
        stats = await asyncio.to_thread(target.stats)
        answers = [line.answer for line in lines if line.answer is not None]
        if phase(stats, answers):
            return
        await asyncio.sleep(0.002)
    raise RuntimeError(f"the requests were not in that phase within {PHASE_SECONDS:g} s")


async def wait_for_service(
    target: Target, known: list[int] | None, struck: float, most: float
) -> tuple[float | None, float | None]:
    """Seconds after the blow until /ready says so, and until the known request has its known answer again."""
    ready: float | None = None
    while time.monotonic() - struck < most and target.served is not None and target.served.process.poll() is None:
        if ready is None and await asyncio.to_thread(target.is_ready):
            ready = time.monotonic() - struck
        if ready is not None and await asyncio.to_thread(target.known_answer, 5.0) == known:
            return ready, time.monotonic() - struck
        await asyncio.sleep(0.05)
    return ready, None


def end_of(answer: Answer) -> str:
    """How a request ended at its client, in words."""
    if answer.status is None:
        return "connection closed" if answer.ending == "cut" else answer.ending
    if answer.ending != "whole":
        return f"stream {answer.ending}"
    if answer.status != 200:
        return f"{answer.status}"
    return "error in the stream" if error_of(answer.documents()) is not None else "whole"


def judge(
    answers: list[Answer], num_late: int, written: list[dict[str, str]], ready: float | None, right: float | None
) -> Outcome:
    """Put the ends at the clients and the lines of the server side by side.

    The known requests that were sent after the blow have lines of their own, told apart by their lengths.
    """
    ends = Counter(map(end_of, answers))
    if num_late:
        ends["open"] += num_late
    mine = [line for line in written if not is_known(line)]
    twice = [name for name, count in Counter(line["request_id"] for line in written).items() if count > 1]
    wrong = [f"{name} has more than one line" for name in twice]
    named = {line["request_id"] for line in mine}
    unseen = sum(end_of(one) in ("503", "connection closed") and one.request_id is None for one in answers)
    if not NUM_REQUESTS - unseen <= len(mine) <= NUM_REQUESTS:
        wrong.append(f"{NUM_REQUESTS} requests were sent, {len(mine)} lines were written")
    wrong += [f"{one.request_id} has no line" for one in answers if one.request_id and one.request_id not in named]
    return Outcome(ends, Counter(kind_of(line["outcome"]) for line in mine), wrong, ready, right)


def is_known(line: dict[str, str]) -> bool:
    """Whether a line is that of the known request, served whole."""
    return line["outcome"] == "length" and line["completion_tokens"] == "16"


def tell(report: PartReport, table: Table, fault: Fault, outcome: Outcome, bound: float) -> None:
    """Add what a fault did."""

    def words(counts: Counter[str]) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))

    times = (outcome.ready_seconds, outcome.known_seconds)
    table.add(fault.what, fault.place, NUM_REQUESTS, words(outcome.ends), words(outcome.lines), *times)
    report.figures[fault.place] = {"ends": outcome.ends, "lines": outcome.lines, "ready": times[0], "known": times[1]}
    report.problems += [f"{fault.place}: {problem}" for problem in outcome.wrong]
    name = fault.place
    report.promise(f"{name}: the fault has happened", outcome.has_happened)
    report.promise(
        f"{name}: every request ended at its client", outcome.ends["open"] == 0 and outcome.ends["late"] == 0
    )
    report.promise(f"{name}: exactly one outcome line for each", not outcome.wrong, len(outcome.wrong))
    is_back = outcome.known_seconds is not None and outcome.known_seconds <= bound
    report.promise(f"{name}: ready and right again within {bound:g} s", is_back, outcome.known_seconds)
