"""A load's figures as people and scripts read them: the text table and the JSON keys of `vllm bench serve`.

What vLLM does not print follows its sections, so that a script that reads its rows finds them where they were.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from glint.bench.report import LoadReport

WIDTH = 50
LABEL_WIDTH = 40
VALUE_WIDTH = 10
SECTIONS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)
NOT_MEASURED = "n/a"


def render(report: LoadReport) -> str:
    """The whole table of one load."""
    lines = [_title(" Serving Benchmark Result ", "="), *_head_rows(report)]
    for name, short, title in SECTIONS:
        lines += [_title(title, "-"), *_latency_rows(report, name, short)]
    lines += [_title("Lengths", "-"), *_length_rows(report)]
    lines += [_title("Client and Server", "-"), *_cost_rows(report)]
    if report.errors:
        lines.append(_title("Errors", "-"))
        lines += [f"{count} x {message}" for message, count in report.errors]
        if report.measured.has_given_up:
            lines.append("The load ended early: nothing but failures came back.")
    return "\n".join([*lines, "=" * WIDTH])


def as_json(report: LoadReport) -> dict[str, Any]:
    """One load as a flat object under vLLM's keys, and more keys for what vLLM does not measure."""
    measured = report.measured
    found: dict[str, Any] = {
        "base_url": measured.base_url,
        "endpoint_type": "openai" if measured.endpoint == "completions" else "openai-chat",
        "model_id": measured.model,
        "prompts": measured.prompts,
        "max_concurrency": measured.concurrency,
        "request_rate": "inf" if measured.request_rate is None else measured.request_rate,
        "duration": measured.seconds,
        "completed": report.completed,
        "failed": report.failed,
        "total_input_tokens": report.input_tokens,
        "total_output_tokens": report.output_tokens,
        "request_throughput": report.request_throughput,
        "request_goodput": report.goodput,
        "output_throughput": report.output_throughput,
        "total_token_throughput": report.total_throughput,
        "max_output_tokens_per_s": report.peak_output,
        "max_concurrent_requests": report.peak_concurrent,
    }
    for name, _, _ in SECTIONS:
        distribution = report.latencies[name]
        for key in ("mean", "median", "std"):
            found[f"{key}_{name}_ms"] = None if distribution is None else getattr(distribution, key)
        for point, value in () if distribution is None else distribution.percentiles:
            found[f"p{point:g}_{name}_ms"] = value
    return {**found, **_extra_keys(report)}


def _extra_keys(report: LoadReport) -> dict[str, Any]:
    measured = report.measured
    has_lengths = measured.prompts != "questions"
    return {
        "asked_input_tokens": measured.prompt_tokens if has_lengths else None,
        "asked_output_tokens": measured.output_tokens,
        "mean_input_tokens": report.mean_input_tokens,
        "mean_output_tokens": report.mean_output_tokens,
        "requests_off_input_length": report.off_input_length if has_lengths else None,
        "requests_off_output_length": report.off_output_length if has_lengths else None,
        "requests_without_usage": report.without_usage,
        "requests_cut_at_the_end": report.cut,
        "output_tokens_of_cut_requests": report.output_tokens_of_cut,
        "output_tokens_by_second": list(report.output_per_second),
        "client_cpu_us_per_token": client_cost(report),
        "server_cpu_us_per_token": server_cost(report),
        "server_cpu_us_per_token_by_thread": dict(thread_costs(report)),
        "server_tokens_per_step": per_step(report, "step_tokens"),
        "server_requests_per_step": per_step(report, "step_items"),
        "server_generated_tokens_per_step": per_step(report, "generation_tokens"),
        "server_drafts_per_step": per_step(report, "draft_tokens"),
        "server_share_of_drafts_right": share_right(report),
        "errors": [{"message": message, "count": count} for message, count in report.errors],
    }


def client_cost(report: LoadReport) -> float | None:
    """Microseconds of CPU that this client took per output token."""
    return report.measured.client_cpu_seconds * 1e6 / report.output_tokens if report.output_tokens else None


def thread_costs(report: LoadReport) -> list[tuple[str, float]]:
    """Microseconds of CPU per generated token of every thread that the server names."""
    server = report.measured.server
    if server is None or not server.generation_tokens:
        return []
    return [(name, seconds * 1e6 / server.generation_tokens) for name, seconds in server.cpu_seconds.items()]


def server_cost(report: LoadReport) -> float | None:
    """Microseconds of CPU per generated token of all threads that the server names, together."""
    costs = thread_costs(report)
    return sum(cost for _, cost in costs) if costs else None


def per_step(report: LoadReport, name: str) -> float | None:
    """A counter of the server divided by its steps."""
    server = report.measured.server
    value = None if server is None else getattr(server, name)
    return None if server is None or value is None or not server.steps else value / server.steps


def share_right(report: LoadReport) -> float | None:
    """The share of the server's drafts that were right; None where it made none or does not tell."""
    server = report.measured.server
    if server is None or not server.draft_tokens or server.accepted_draft_tokens is None:
        return None
    return server.accepted_draft_tokens / server.draft_tokens


def compare(runs: Sequence[LoadReport]) -> list[dict[str, Any]]:
    """For every concurrency, each peer beside the first server: medians over the runs, and the ratios.

    A ratio over 1 means that the first server is better: more tokens per second, fewer milliseconds.
    """
    found = []
    own_url = runs[0].measured.base_url
    for concurrency in dict.fromkeys(run.measured.concurrency for run in runs):
        group = [run for run in runs if run.measured.concurrency == concurrency]
        own = _figures([run for run in group if run.measured.base_url == own_url])
        for url in dict.fromkeys(run.measured.base_url for run in group if run.measured.base_url != own_url):
            peer = _figures([run for run in group if run.measured.base_url == url])
            ratios = {
                "output_throughput": _ratio(own["output_throughput"], peer["output_throughput"]),
                "median_ttft_ms": _ratio(peer["median_ttft_ms"], own["median_ttft_ms"]),
                "median_tpot_ms": _ratio(peer["median_tpot_ms"], own["median_tpot_ms"]),
            }
            found.append({"concurrency": concurrency, "peer_url": url, "own": own, "peer": peer, "ratio": ratios})
    return found


def render_comparison(own_url: str, rows: Sequence[dict[str, Any]]) -> str:
    """The ratio table of a side-by-side run."""
    names = ("output_throughput", "median_ttft_ms", "median_tpot_ms")
    titles = ("output tok/s", "TTFT ms", "TPOT ms")
    lines = [f"{own_url} beside its peers; a ratio over 1 means that it is better"]
    for url in dict.fromkeys(row["peer_url"] for row in rows):
        lines += ["", f"peer {url}"]
        lines.append(f"{'at once':>8}" + "".join(f"{title:>14}{'peer':>10}{'ratio':>8}" for title in titles))
        for row in rows:
            if row["peer_url"] == url:
                cells = "".join(
                    f"{_figure(row['own'][name]):>14}{_figure(row['peer'][name]):>10}{_figure(row['ratio'][name]):>8}"
                    for name in names
                )
                lines.append(f"{row['concurrency']:>8}{cells}")
    return "\n".join(lines)


def _figures(runs: Sequence[LoadReport]) -> dict[str, float | None]:
    values: dict[str, list[float | None]] = {
        "output_throughput": [run.output_throughput for run in runs],
        "median_ttft_ms": [run.median("ttft") for run in runs],
        "median_tpot_ms": [run.median("tpot") for run in runs],
    }
    known = {name: [value for value in found if value is not None] for name, found in values.items()}
    return {name: median(found) if found else None for name, found in known.items()}


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _title(text: str, mark: str) -> str:
    return f"{text:{mark}^{WIDTH}}"


def _figure(value: float | int | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _row(label: str, value: float | int | None) -> str:
    return f"{label:<{LABEL_WIDTH}} {_figure(value):<{VALUE_WIDTH}}"


def _head_rows(report: LoadReport) -> list[str]:
    measured = report.measured
    rows = [
        _row("Successful requests:", report.completed),
        _row("Failed requests:", report.failed),
        _row("Maximum request concurrency:", measured.concurrency),
    ]
    if measured.request_rate is not None:
        rows.append(_row("Request rate configured (RPS):", measured.request_rate))
    rows += [
        _row("Benchmark duration (s):", measured.seconds),
        _row("Total input tokens:", report.input_tokens),
        _row("Total generated tokens:", round(report.output_tokens)),
        _row("Request throughput (req/s):", report.request_throughput),
    ]
    if report.goodput is not None:
        rows.append(_row("Request goodput (req/s):", report.goodput))
    return rows + [
        _row("Output token throughput (tok/s):", report.output_throughput),
        _row("Peak output token throughput (tok/s):", report.peak_output),
        _row("Peak concurrent requests:", float(report.peak_concurrent)),
        _row("Total token throughput (tok/s):", report.total_throughput),
    ]


def _latency_rows(report: LoadReport, name: str, short: str) -> list[str]:
    found = report.latencies[name]
    if found is None:
        return [_row(f"{label} {short} (ms):", None) for label in ("Mean", "Median")]
    rows = [_row(f"Mean {short} (ms):", found.mean), _row(f"Median {short} (ms):", found.median)]
    return rows + [_row(f"P{point:g} {short} (ms):", value) for point, value in found.percentiles]


def _length_rows(report: LoadReport) -> list[str]:
    measured = report.measured
    has_lengths = measured.prompts != "questions"
    rows = [_row("Asked input tokens of a request:", measured.prompt_tokens)] if has_lengths else []
    rows += [
        _row(f"{'Asked' if has_lengths else 'Most'} output tokens of a request:", measured.output_tokens),
        _row("Mean input tokens:", report.mean_input_tokens),
        _row("Mean output tokens:", report.mean_output_tokens),
    ]
    if has_lengths:
        rows.append(_row(f"Requests not of {measured.prompt_tokens} input tokens:", report.off_input_length))
        rows.append(_row(f"Requests not of {measured.output_tokens} output tokens:", report.off_output_length))
    rows += [
        _row("Requests cut at the end:", report.cut),
        _row("Generated tokens of cut requests:", round(report.output_tokens_of_cut)),
    ]
    if report.without_usage:
        rows.append(_row("Requests without usage (chunks counted):", report.without_usage))
    return rows


def _cost_rows(report: LoadReport) -> list[str]:
    rows = [_row("Client CPU per streamed token (us):", client_cost(report))]
    if report.measured.server is None:
        return rows
    rows.append(_row("Server CPU per streamed token (us):", server_cost(report)))
    rows += [_row(f"  thread {name} (us):", cost) for name, cost in thread_costs(report)]
    sizes = (
        ("Mean tokens per step:", per_step(report, "step_tokens")),
        ("Mean requests per step:", per_step(report, "step_items")),
        ("Mean generated tokens per step:", per_step(report, "generation_tokens")),
    )
    rows += [_row(label, size) for label, size in sizes if size is not None]
    share = share_right(report)
    if share is not None:
        rows.append(_row("Mean drafts per step:", per_step(report, "draft_tokens")))
        rows.append(_row("Share of drafts that were right (%):", 100 * share))
    return rows
