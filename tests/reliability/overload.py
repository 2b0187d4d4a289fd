"""Overload: what is served keeps its speed, the rest is refused at once, at up to eight times what fits."""

from __future__ import annotations

from typing import Any

from tests.reliability.load import Load, output_tokens, put_load
from tests.reliability.options import Options
from tests.reliability.report import PartReport, Table

FACTORS = (1, 2, 4, 8)
SHORT_FACTORS = (4, 8)
JUDGED_FACTOR = 4
ALLOWED_LOSS = 0.10
REFUSAL_MS = 50.0
COLUMNS = (
    "load",
    "sent/s",
    "served/s",
    "tok/s",
    "TPOT p50 ms",
    "TPOT p99 ms",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "refused",
    "refusal p50 ms",
    "refusal p99 ms",
    "failed",
)


def overload(options: Options) -> PartReport:
    """Run the part."""
    slots = int(options.pick("concurrency", 8, 64))
    seconds = options.pick("seconds", 3, 30)
    flags = ("--max-num-seqs", str(slots), "--max-num-queued-reqs", str(max(4, slots // 4)), *options.room(slots))
    report = PartReport(
        "overload",
        f"1x is a closed loop of as many clients as requests may run ({slots}); the rows below offer multiples of the "
        f"requests per second that it served, with exponential arrivals that wait for nobody (open loop), {seconds:g} "
        f"s each, of which the last 80% count. {max(4, slots // 4)} requests may wait.",
    )
    with options.server("overload", *flags) as target:
        tokens = output_tokens(target, 48 if options.short else 128)
        table = report.table(f"{tokens} greedy tokens per request", *COLUMNS)
        base = put_load(options, target, slots, seconds, tokens, label="base")
        add_row(table, "1x closed", base)
        loads: dict[int, Load] = {}
        for factor in SHORT_FACTORS if options.short else FACTORS:
            rate = factor * base.requests_per_second()
            loads[factor] = put_load(options, target, slots, seconds, tokens, rate, f"{factor}x")
            add_row(table, f"{factor}x open", loads[factor])
        target.wait_idle()
    report.figures["loads"] = {name: figures(load) for name, load in ({"closed": base} | loads).items()}
    judge(report, base, loads, judges_speed=not options.short)
    return report


def add_row(table: Table, name: str, load: Load) -> None:
    """One load as a row."""
    table.add(name, *list(figures(load).values()))


def figures(load: Load) -> dict[str, Any]:
    """The figures of a load in the order of the columns."""
    began = min(one.started for one in load.sent)
    return {
        "sent_per_second": len(load.sent) / (load.end - began),
        "served_per_second": load.requests_per_second(),
        "tokens_per_second": load.tokens_per_second(),
        "tpot_p50_ms": load.tpot_ms(50),
        "tpot_p99_ms": load.tpot_ms(99),
        "ttft_p50_ms": load.ttft_ms(50),
        "ttft_p99_ms": load.ttft_ms(99),
        "refused": len(load.refused),
        "refusal_p50_ms": load.refusal_ms(50),
        "refusal_p99_ms": load.refusal_ms(99),
        "failed": len(load.failed),
    }


def judge(report: PartReport, base: Load, loads: dict[int, Load], *, judges_speed: bool) -> None:
    """Add the promises."""
    every = [base, *loads.values()]
    failed = [f"{one.status} {one.ending} {one.message}" for load in every for one in load.failed]
    report.problems += failed
    report.promise("nothing but 200 and 429", not failed, len(failed))
    bare = sum(one.retry_after is None for load in every for one in load.refused)
    report.promise("every 429 has Retry-After", bare == 0, bare)
    most = max(loads)
    report.promise(f"at {most}x some are served and some refused", bool(loads[most].served and loads[most].refused))
    load = loads[JUDGED_FACTOR]
    speed = load.tpot_ms(50) / max(base.tpot_ms(50), 1e-9)
    share = load.tokens_per_second() / max(base.tokens_per_second(), 1e-9)
    late = load.refusal_ms(99)
    name = f"at {JUDGED_FACTOR}x"

    def held(is_so: bool) -> bool | None:
        return is_so if judges_speed else None

    report.promise(f"{name} TPOT p50 within 10% of 1x", held(speed <= 1 + ALLOWED_LOSS), f"{100 * speed:.1f}%")
    report.promise(f"{name} tok/s within 10% of 1x", held(share >= 1 - ALLOWED_LOSS), f"{100 * share:.1f}%")
    report.promise(
        f"{name} refusals within {REFUSAL_MS:g} ms (p99)", held(late is not None and late <= REFUSAL_MS), late
    )
