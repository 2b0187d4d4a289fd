"""The metrics as Prometheus parses them, against figures counted another way."""

import json
import os
import random
import statistics
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from glint.server.metrics import EngineReading, Histogram, Metrics
from glint.server.outcomes import Outcome, RequestOutcome

READING = EngineReading(
    num_running=3,
    num_waiting=2,
    pages_free=70,
    pages_held=25,
    pages_cached=5,
    num_preemptions=4,
    cpu_seconds={"loop": 1.5, "engine": 2.5},
)

VLLM_GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"]
VLLM_COUNTERS = [
    "prompt_tokens",
    "generation_tokens",
    "prompt_tokens_cached",
    "request_success",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
]
VLLM_HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
]

Labels = tuple[tuple[str, str], ...]


def make(reading: EngineReading = READING) -> Metrics:
    return Metrics('glm "4.7"\n', lambda: reading, {"page_tokens": 16, "num_pages": 100})


def parse(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    """Every sample by its name and its labels other than the model's name, which all must carry."""
    text, content_type = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("glint:"):
                assert labels.pop("model_name") == 'glm "4.7"\n'
            key = sample.name.removeprefix("glint:"), tuple(sorted(labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def outcome(kind: Outcome, **fields: Any) -> RequestOutcome:
    return RequestOutcome("id", "/", kind, **fields)


def test_the_names_of_vllm_are_there_from_the_start() -> None:
    families = {family.name: family for family in text_string_to_metric_families(make().render()[0].decode())}
    kinds = {name: family.type for name, family in families.items() if name.startswith("glint:")}
    expected = {f"glint:{name}": "gauge" for name in VLLM_GAUGES}
    expected |= {f"glint:{name}": "counter" for name in VLLM_COUNTERS}
    expected |= {f"glint:{name}": "histogram" for name in VLLM_HISTOGRAMS}
    own = {"pages": "gauge", "startup_seconds": "gauge", "requests": "counter", "steps": "counter"}
    own |= dict.fromkeys(("server_cpu_seconds", "restarts", "prompt_tokens_computed", "queue_full"), "counter")
    assert kinds == expected | {f"glint:{name}": kind for name, kind in own.items()}
    for name in VLLM_COUNTERS:
        assert all(sample.name == f"glint:{name}_total" for sample in families[f"glint:{name}"].samples)
    for name in VLLM_HISTOGRAMS:
        found = {sample.name for sample in families[f"glint:{name}"].samples}
        assert found == {f"glint:{name}{end}" for end in ("_bucket", "_count", "_sum")}
    assert all(family.documentation for family in families.values())


def test_gauges_are_read_when_asked() -> None:
    metrics = make()
    metrics.set_startup({"load weights": 1.25, "warm up": 0.5})
    samples = parse(metrics)
    assert samples["num_requests_running", ()] == 3
    assert samples["num_requests_waiting", ()] == 2
    assert samples["kv_cache_usage_perc", ()] == 0.25
    assert samples["num_preemptions_total", ()] == 4
    assert [samples["pages", (("state", state),)] for state in ("free", "held", "cached")] == [70, 25, 5]
    assert samples["startup_seconds", (("phase", "load weights"),)] == 1.25
    assert samples["server_cpu_seconds_total", (("thread", "engine"),)] == 2.5
    assert samples["server_cpu_seconds_total", (("thread", "loop"),)] == 1.5
    assert samples["cache_config_info", (("num_pages", "100"), ("page_tokens", "16"))] == 1
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert samples["process_resident_memory_bytes", ()] == pytest.approx(resident, rel=0.2)


def test_a_full_queue_is_counted_apart_from_other_refusals() -> None:
    metrics = make()
    for reason in ("queue_full", "invalid_value", "queue_full"):
        metrics.record(outcome("refused", reason=reason))
    assert parse(metrics)["queue_full_total", ()] == metrics.as_dict()["requests_refused_by_full_queue"] == 2
    assert parse(metrics)["requests_total", (("outcome", "refused"),)] == 3


def test_the_last_minute_forgets_what_is_older() -> None:
    now = [100.0]
    metrics = Metrics("model", lambda: READING, {}, lambda: now[0])

    def minute() -> dict[str, Any]:
        return dict(metrics.as_dict()["last_minute"])

    def work(seconds: float) -> None:
        metrics.observe_step(30, 6)
        metrics.observe_gap(seconds, 4)
        metrics.observe_prompt(40, 10)
        metrics.observe_first_token(seconds)
        metrics.record(outcome("failed", first_token_seconds=seconds))

    assert minute()["output_tokens_per_second"] == 0 and minute()["prefix_cache_hit_ratio"] is None
    work(0.5)
    now[0] += 10
    assert minute()["seconds"] == 10
    assert (minute()["output_tokens_per_second"], minute()["prompt_tokens_per_second"]) == (0.6, 3.0)
    assert minute()["requests_by_outcome"]["failed"] == 1 and minute()["prefix_cache_hit_ratio"] == 0.25
    work(5.0)
    now[0] += 51
    assert minute()["seconds"] == 60 and minute()["output_tokens_per_second"] == 0.1
    assert minute()["inter_token_latency_seconds"]["count"] == 4
    assert 2.0 < minute()["time_to_first_token_seconds"]["p50"] <= 5.0
    now[0] += 60
    assert minute()["output_tokens_per_second"] == 0 and minute()["time_to_first_token_seconds"]["p99"] is None
    work(0.5)
    assert minute()["output_tokens_per_second"] == 0.1
    assert metrics.as_dict()["uptime_seconds"] == 121 and metrics.as_dict()["computed_prompt_tokens"] == 90


@given(st.lists(st.floats(0.0, 40.0), max_size=30), st.floats(0.0, 200.0))
def test_the_last_minute_agrees_with_a_list_of_times(pauses: list[float], wait: float) -> None:
    now = [0.0]
    metrics = Metrics("model", lambda: READING, {}, lambda: now[0])
    times = []
    for pause in pauses:
        now[0] += pause
        times.append(now[0])
        metrics.observe_step(0, 1)
    now[0] += wait
    count = metrics.as_dict()["last_minute"]["output_tokens_per_second"] * metrics.as_dict()["last_minute"]["seconds"]
    surely = sum(at > now[0] - 59 for at in times)
    perhaps = sum(at >= now[0] - 60 for at in times)
    assert surely - 1e-6 <= count <= perhaps + 1e-6


def test_an_engine_without_pages_has_no_usage() -> None:
    assert EngineReading(0, 0, 0, 0, 0, 0, {}).page_usage == 0


def test_counters_add_up() -> None:
    metrics = make()
    metrics.observe_step(100, 0)
    metrics.observe_step(0, 3)
    metrics.observe_step(20, 4)
    for draft_tokens, accepted_tokens in ((3, 2), (0, 0), (3, 1), (3, 1)):
        metrics.observe_drafts(draft_tokens, accepted_tokens)
    metrics.observe_prompt(100, 64)
    metrics.observe_prompt(20, 0)
    samples = parse(metrics)
    assert samples["steps_total", ()] == 3
    assert samples["generation_tokens_total", ()] == 7
    assert samples["prompt_tokens_total", ()] == samples["prefix_cache_queries_total", ()] == 120
    drafts = [samples[f"spec_decode_num_{name}_total", ()] for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert drafts == [3, 9, 4]
    places = [samples["spec_decode_num_accepted_tokens_per_pos_total", (("position", str(n)),)] for n in range(2)]
    assert places == [3, 1] == metrics.as_dict()["accepted_draft_tokens_per_position"]
    assert samples["prompt_tokens_cached_total", ()] == samples["prefix_cache_hits_total", ()] == 64
    assert (samples["iteration_tokens_total_count", ()], samples["iteration_tokens_total_sum", ()]) == (3, 127)


def test_every_outcome_is_counted_once() -> None:
    metrics = make()
    counts = dict(zip(get_args(Outcome), range(1, 8), strict=True))
    for kind, count in counts.items():
        for _ in range(count):
            metrics.record(outcome(kind))
    samples = parse(metrics)
    assert {kind: samples["requests_total", (("outcome", kind),)] for kind in counts} == counts
    successes = {dict(labels).get("finished_reason"): v for (name, labels), v in samples.items() if "_success_" in name}
    assert successes == {
        "stop": counts["finished"] + counts["stopped"],
        "length": counts["length"],
        "abort": counts["cancelled"],
        "error": counts["failed"],
    }
    assert all(samples[f"{name}_count", ()] == 0 for name in VLLM_HISTOGRAMS)


def test_what_happened_before_this_process() -> None:
    metrics = make()
    assert metrics.as_dict()["restarts"] == 0
    metrics.set_history(restarts=3, lost=8)
    samples = parse(metrics)
    assert samples["restarts_total", ()] == metrics.as_dict()["restarts"] == 3
    assert samples["requests_total", (("outcome", "lost"),)] == metrics.as_dict()["requests_by_outcome"]["lost"] == 8


def test_the_times_of_a_request() -> None:
    metrics = make()
    metrics.record(
        outcome(
            "finished",
            num_choices=2,
            prompt_tokens=30,
            completion_tokens=22,
            queue_seconds=0.5,
            first_token_seconds=2.0,
            decode_seconds=5.0,
            total_seconds=7.25,
        )
    )
    samples = parse(metrics)
    sums = {name: samples[f"{name}_sum", ()] for name in VLLM_HISTOGRAMS}
    assert sums == {
        "time_to_first_token_seconds": 0,
        "inter_token_latency_seconds": 0,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 7.25,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "request_decode_time_seconds": 5.0,
        "request_inference_time_seconds": 6.5,
        "request_prompt_tokens": 30,
        "request_generation_tokens": 22,
        "iteration_tokens_total": 0,
    }


def test_a_single_token_has_no_time_per_token() -> None:
    metrics = make()
    for tokens in (0, 1):
        metrics.record(outcome("length", num_choices=1, completion_tokens=tokens, decode_seconds=0.0))
    assert parse(metrics)["request_time_per_output_token_seconds_count", ()] == 0


def test_requests_that_did_not_run_to_their_end_leave_the_latencies_alone() -> None:
    metrics = make()
    metrics.record(
        outcome("cancelled", num_choices=1, first_token_seconds=0.5, total_seconds=900.0, completion_tokens=4)
    )
    metrics.record(outcome("refused", total_seconds=0.001))
    samples = parse(metrics)
    assert samples["e2e_request_latency_seconds_count", ()] == samples["request_generation_tokens_count", ()] == 0


@given(st.lists(st.tuples(st.floats(0, 200), st.integers(1, 64)), max_size=30))
def test_buckets_count_what_is_up_to_their_bound(gaps: list[tuple[float, int]]) -> None:
    metrics = make()
    for seconds, count in gaps:
        metrics.observe_gap(seconds, count)
    samples = parse(metrics)
    values = np.repeat([seconds for seconds, _ in gaps], [count for _, count in gaps]) if gaps else np.zeros(0)
    name = "inter_token_latency_seconds_bucket"
    buckets = {dict(key[1])["le"]: value for key, value in samples.items() if key[0] == name}
    assert len(buckets) == 20
    for bound, count in buckets.items():
        assert count == np.count_nonzero(values <= float(bound))
    assert samples["inter_token_latency_seconds_count", ()] == len(values)
    assert samples["inter_token_latency_seconds_sum", ()] == pytest.approx(values.sum())


def test_quantiles_lie_in_the_bucket_of_the_true_one() -> None:
    rng = random.Random(4)
    values = [rng.lognormvariate(-3, 1) for _ in range(5000)]
    histogram = Histogram([0.001 * 1.5**power for power in range(30)])
    for value in values:
        histogram.observe(value)
    cuts = statistics.quantiles(values, n=100)
    for share in (0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(cuts[round(share * 100) - 1], rel=0.5)
    uniform = Histogram([10.0, 20.0, 30.0])
    for value in np.arange(0.05, 30, 0.1):
        uniform.observe(value)
    for share in (0.1, 0.5, 0.9):
        assert uniform.quantile(share) == pytest.approx(30 * share)


def test_quantiles_at_the_edges() -> None:
    histogram = Histogram([1.0, 2.0])
    assert histogram.quantile(0.5) is None
    histogram.observe(50.0)
    assert histogram.quantile(0.5) == 2.0
    assert histogram.as_dict() == {"count": 1, "sum": 50.0, "p50": 2.0, "p90": 2.0, "p99": 2.0}


def test_the_json_has_the_same_figures() -> None:
    metrics = make()
    metrics.set_startup({"load": 2.0})
    metrics.observe_step(8, 3)
    metrics.observe_gap(0.02, 3)
    metrics.observe_prompt(8, 4)
    metrics.observe_first_token(0.5)
    metrics.record(outcome("stopped", num_choices=1, total_seconds=1.5, first_token_seconds=0.5))
    samples = parse(metrics)
    figures = json.loads(json.dumps(metrics.as_dict()))
    for plain, name in {
        "requests_running": "num_requests_running",
        "requests_waiting": "num_requests_waiting",
        "page_usage_ratio": "kv_cache_usage_perc",
        "preemptions": "num_preemptions_total",
        "steps": "steps_total",
        "prompt_tokens": "prompt_tokens_total",
        "cached_prompt_tokens": "prompt_tokens_cached_total",
        "generated_tokens": "generation_tokens_total",
        "prefix_cache_queried_tokens": "prefix_cache_queries_total",
        "prefix_cache_hit_tokens": "prefix_cache_hits_total",
        "draft_tokens": "spec_decode_num_draft_tokens_total",
        "accepted_draft_tokens": "spec_decode_num_accepted_tokens_total",
    }.items():
        assert figures[plain] == samples[name, ()]
    for name in VLLM_HISTOGRAMS:
        plain = name.replace("iteration_tokens_total", "step_tokens").replace("_generation_", "_generated_")
        assert figures[plain]["count"] == samples[f"{name}_count", ()]
        assert figures[plain]["sum"] == samples[f"{name}_sum", ()]
    assert figures["requests_by_outcome"]["stopped"] == 1
    assert figures["pages"] == {"free": 70, "held": 25, "cached": 5}
    assert figures["startup_seconds"] == {"load": 2.0}
    assert figures["cpu_seconds"] == {"loop": 1.5, "engine": 2.5}
    assert figures["process_resident_memory_bytes"] > 1e6
