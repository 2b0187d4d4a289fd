"""Streams: how many tokens per second the server passes on to many clients, and what that costs it."""

from __future__ import annotations

from tests.reliability.load import output_tokens, put_load
from tests.reliability.options import Options
from tests.reliability.report import PartReport


def streams(options: Options) -> PartReport:
    """Run the part."""
    counts = (16,) if options.short else options.stream_counts
    seconds = options.pick("seconds", 4, 30)
    report = PartReport(
        "streams",
        f"Closed loops of streams for {seconds:g} s each, read by {options.num_processes} client processes that count "
        "bytes and read the last usage alone; the server's processor time is its own figure, of the event loop and of "
        "the engine's Python thread.",
    )
    columns = (
        "streams",
        "tok/s",
        "TPOT p50 ms",
        "TTFT p50 ms",
        "event loop us/token",
        "engine thread us/token",
        "failed",
    )
    with options.server("streams", "--max-num-seqs", str(max(counts)), *options.room(max(counts))) as target:
        tokens = output_tokens(target, 96 if options.short else 256)
        table = report.table(f"{tokens} greedy tokens per request", *columns)
        for count in counts:
            put_load(options, target, count, seconds / 5, tokens, label="warm")
            before = target.wait_idle()
            load = put_load(options, target, count, seconds, tokens, label=str(count))
            after = target.wait_idle()
            generated = after["generated_tokens"] - before["generated_tokens"]
            cost = {
                thread: 1e6 * (after["cpu_seconds"][thread] - before["cpu_seconds"][thread]) / max(1, generated)
                for thread in ("loop", "engine")
            }
            rate = load.tokens_per_second()
            table.add(
                str(count), rate, load.tpot_ms(50), load.ttft_ms(50), cost["loop"], cost["engine"], len(load.failed)
            )
            report.figures[str(count)] = {"tokens_per_second": rate, "us_per_token": cost, "failed": len(load.failed)}
            report.problems += [f"{one.status} {one.ending} {one.message}" for one in load.failed]
            got = sum(one.tokens for one in load.sent)
            report.promise(f"{count} streams: none failed", not load.failed, len(load.failed))
            report.promise(f"{count} streams: clients got every token", got == generated, got - generated)
        least = options.min_tokens_per_second
        if least is not None:
            report.promise(f"{max(counts)} streams get {least:,.0f} tok/s", rate >= least, rate)
    return report
