"""`glint bench scheduler`: the cost of planning one step, without any engine."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from glint.bench.machine import check_writable, processor_name
from glint.engine.scheduler import Scheduler
from glint.errors import RequestError

RUNNING = (1, 8, 64, 256)
STEPS = 2000
PROMPT_TOKENS = 256
PAGE_TOKENS = 16
CHUNK_TOKENS = 512
WARM_UP_STEPS = 50


@dataclass(frozen=True)
class Row:
    """Microseconds that one step of `running` decoding requests costs the scheduler.

    With `is_queued` one more request waits for pages, so that every step counts the pages of all.
    """

    running: int
    is_queued: bool
    mean: float
    p50: float
    p99: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the bench."""
    parser.add_argument(
        "--running",
        type=int,
        nargs="+",
        default=list(RUNNING),
        metavar="N",
        help=f"decoding requests, one row for each (default: {' '.join(map(str, RUNNING))})",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to time for each row (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


def run(chosen: argparse.Namespace) -> int:
    """Measures, prints a table, and writes JSON where asked."""
    for name, values in (("--running", chosen.running), ("--steps", [chosen.steps])):
        if min(values) < 1:
            raise RequestError(f"{name} is {min(values)}; it must be at least 1")
    if chosen.json is not None:
        check_writable(chosen.json)
    rows = [measure(running, chosen.steps, is_queued) for is_queued in (False, True) for running in chosen.running]
    print(render(rows, chosen.steps))
    if chosen.json is not None:
        figures = {"unit": "microseconds", "steps": chosen.steps, "rows": [asdict(row) for row in rows]}
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(running: int, steps: int, is_queued: bool) -> Row:
    """Time plan, start and end of steps in which every running request decodes one token."""
    scheduler = Scheduler(running + 1 + CHUNK_TOKENS, running + 1, PAGE_TOKENS)
    plenty_pages = running * (PROMPT_TOKENS + steps + WARM_UP_STEPS)
    for request_id in range(running):
        scheduler.add(request_id, PROMPT_TOKENS, 2 * (running + steps + WARM_UP_STEPS))
    while scheduler.num_waiting or len(scheduler.plan(plenty_pages).items) < running:
        _run_step(scheduler, plenty_pages)
    if is_queued:
        scheduler.add(running, PROMPT_TOKENS, 1)
    for _ in range(WARM_UP_STEPS):
        _run_step(scheduler, available_pages=0)
    seconds = [_run_step(scheduler, available_pages=0) for _ in range(steps)]
    return summarise(running, is_queued, [1e6 * value for value in seconds])


def summarise(running: int, is_queued: bool, microseconds: Sequence[float]) -> Row:
    """Mean, median and the value that 99 of 100 steps stay below."""
    ordered = sorted(microseconds)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return Row(running, is_queued, statistics.fmean(ordered), statistics.median(ordered), p99)


def render(rows: Sequence[Row], steps: int) -> str:
    """The table a person reads."""
    lines = [
        f"processor  {processor_name()}",
        f"scheduler  plan and count one step, {steps} steps a row, microseconds per step",
        "",
        f"{'running requests':34}{'mean':>10}{'p50':>10}{'p99':>10}",
    ]
    for row in rows:
        name = f"{row.running} decoding" + (", one waits for pages" if row.is_queued else "")
        lines.append(f"{name:34}{row.mean:>10.1f}{row.p50:>10.1f}{row.p99:>10.1f}")
    return "\n".join(lines)


def _run_step(scheduler: Scheduler, available_pages: int) -> float:
    """One step from its plan to its end, and the seconds it took."""
    start = time.perf_counter()
    plan = scheduler.plan(available_pages)
    scheduler.start_step(plan, {})
    scheduler.finish_step(plan)
    return time.perf_counter() - start
