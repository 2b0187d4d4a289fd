"""Metrics of the server: Prometheus text under the names that vLLM's dashboards query, and the same figures as JSON."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from glint.server.acceptance import AcceptanceWatch
from glint.server.outcomes import Outcome, RequestOutcome

PREFIX = "glint:"
RECENT_SECONDS = 60.0
SNAPSHOT_SECONDS = 1.0
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
FINISHED_REASONS: Mapping[Outcome, str] = {
    "finished": "stop",
    "stopped": "stop",
    "length": "length",
    "cancelled": "abort",
    "failed": "error",
}
COMPLETED: frozenset[Outcome] = frozenset({"finished", "stopped", "length"})


def _series(first: int, last: int) -> tuple[float, ...]:
    """1, 2 and 5 times every power of ten from the first up to, and once, the last."""
    steps = [f"{digit}e{power}" for power in range(first, last) for digit in (1, 2, 5)]
    return tuple(float(step) for step in [*steps, f"1e{last}"])


class Histogram:
    """Counts of values up to each bound, and their sum. An observation costs one bisection and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[int]:
        """How many values are up to each bound; the last entry counts them all."""
        return list(accumulate(self.counts))

    def quantile(self, share: float) -> float | None:
        """The value below which that share of the values lies, interpolated as Prometheus does; None without values.

        Values above the last bound count as the last bound.
        """
        cumulative = self.cumulative()
        rank = share * cumulative[-1]
        if not cumulative[-1]:
            return None
        index = bisect_left(cumulative, rank)
        if index == len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[index - 1] if index else 0.0
        below = cumulative[index - 1] if index else 0
        inside = cumulative[index] - below
        return low + (self.bounds[index] - low) * (rank - below) / inside if inside else low

    def as_dict(self) -> dict[str, float | None]:
        """The count, the sum and some quantiles."""
        figures: dict[str, float | None] = {"count": sum(self.counts), "sum": self.total}
        return figures | {name: self.quantile(share) for name, share in QUANTILES.items()}

    def copy(self) -> "Histogram":
        """The same counts and sum, on their own."""
        return self - Histogram(self.bounds)

    def __sub__(self, before: "Histogram") -> "Histogram":
        """The values that were added since `before`."""
        added = Histogram(self.bounds)
        added.counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        added.total = self.total - before.total
        return added


@dataclass(frozen=True)
class Snapshot:
    """Counters and histograms of one moment."""

    at: float
    counters: Mapping[str, int]
    outcomes: Mapping[str, int]
    histograms: Mapping[str, Histogram]


class Recent:
    """Snapshots of the last minute. Each is taken before something is counted, at most one a second.

    So the first snapshot of a span holds what was counted before the span, but for less than a second of it, and a span
    without a snapshot had nothing to count.
    """

    def __init__(self, take: Callable[[float], Snapshot], clock: Callable[[], float]) -> None:
        self._take = take
        self._clock = clock
        self._snapshots: deque[Snapshot] = deque()
        self.began_at = clock()
        self._next_at = self.began_at

    def advance(self) -> None:
        """Take a snapshot if the last is a second old; called before anything is counted."""
        now = self._clock()
        if now >= self._next_at:
            self._next_at = now + SNAPSHOT_SECONDS
            self._snapshots.append(self._take(now))
            while self._snapshots[0].at < now - RECENT_SECONDS:
                self._snapshots.popleft()

    def as_dict(self) -> dict[str, Any]:
        """What was counted in the last minute, or since the start where that is later."""
        now = self._clock()
        today = self._take(now)
        before = next((each for each in self._snapshots if each.at >= now - RECENT_SECONDS), today)
        seconds = min(RECENT_SECONDS, max(now - self.began_at, SNAPSHOT_SECONDS))
        added = {name: value - before.counters[name] for name, value in today.counters.items()}
        queried = added["prefix_cache_queries"]
        return {
            "seconds": seconds,
            "output_tokens_per_second": added["generation_tokens"] / seconds,
            "prompt_tokens_per_second": added["prompt_tokens_computed"] / seconds,
            "prefix_cache_hit_ratio": added["prefix_cache_hits"] / queried if queried else None,
            "requests_by_outcome": {name: value - before.outcomes[name] for name, value in today.outcomes.items()},
            **{name: (value - before.histograms[name]).as_dict() for name, value in today.histograms.items()},
        }


@dataclass(frozen=True)
class EngineReading:
    """The state of the engine when the metrics are read.

    Requests use `pages_held`; only the prefix cache uses `pages_cached`. `cpu_seconds` is the CPU time of each named
    thread since its start.
    """

    num_running: int
    num_waiting: int
    pages_free: int
    pages_held: int
    pages_cached: int
    num_preemptions: int
    cpu_seconds: Mapping[str, float]

    @property
    def page_usage(self) -> float:
        """The share of all pages that requests hold, 0 to 1."""
        num_pages = self.pages_free + self.pages_held + self.pages_cached
        return self.pages_held / num_pages if num_pages else 0.0


_SECONDS = _series(-3, 3)
_TOKENS = _series(0, 6)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Time between the tokens of a choice.", _series(-4, 2)),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, per request.", _series(-4, 2)),
    "e2e_request_latency_seconds": ("Time from arrival to the end.", _SECONDS),
    "request_queue_time_seconds": ("Time from arrival in the queue to the first step.", _SECONDS),
    "request_prefill_time_seconds": ("Time from the first step to the first token.", _SECONDS),
    "request_decode_time_seconds": ("Time from the first token to the last.", _SECONDS),
    "request_inference_time_seconds": ("Time from the first step to the last token.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens per request, all choices together.", _TOKENS),
    "iteration_tokens_total": ("Prompt and generated tokens per step.", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that reached their first token, cached ones included.",
    "generation_tokens": "Tokens generated.",
    "prompt_tokens_cached": "Prompt tokens taken from the prefix cache.",
    "prompt_tokens_computed": "Prompt tokens computed by steps.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Times that a request had drafts verified.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were right and are part of an answer.",
    "queue_full": "Requests refused because the queue was full.",
    "steps": "Steps completed.",
    "restarts": "Times that the engine was started anew after a failure.",
}
_RECENT_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")
_PLAIN_NAMES = {"iteration_tokens_total": "step_tokens", "request_generation_tokens": "request_generated_tokens"}


class Metrics(Collector):
    """All metrics of the server. Only the event loop's thread calls the methods.

    `read` is called whenever metrics are read. `cache_config` becomes the labels of cache_config_info.
    """

    def __init__(
        self,
        model_name: str,
        read: Callable[[], EngineReading],
        cache_config: Mapping[str, object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model_name = model_name
        self._read = read
        self._cache_config = {name: str(value) for name, value in cache_config.items()}
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._outcomes: dict[str, int] = dict.fromkeys(get_args(Outcome), 0)
        self._accepted_per_position: list[int] = []
        self._acceptance = AcceptanceWatch()
        self._startup_seconds: dict[str, float] = {}
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._gaps = self._histograms["inter_token_latency_seconds"]
        self._clock = clock
        self._recent = Recent(self._snapshot, clock)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._process = ProcessCollector(registry=self._registry)

    def set_startup(self, phases: Mapping[str, float]) -> None:
        """Set the seconds of each phase of the start."""
        self._startup_seconds = dict(phases)

    def set_history(self, restarts: int, lost: int) -> None:
        """Set the number of restarts before this process, and of the requests that they lost."""
        self._counters["restarts"] = restarts
        self._outcomes["lost"] = lost

    def observe_step(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Count a step with its prompt tokens and generated tokens."""
        self._recent.advance()
        self._counters["steps"] += 1
        self._counters["generation_tokens"] += num_generated_tokens
        self._counters["prompt_tokens_computed"] += num_prompt_tokens
        self._step_tokens.observe(num_prompt_tokens + num_generated_tokens)

    def observe_drafts(self, draft_tokens: int, accepted_tokens: int) -> None:
        """Count the drafts of one request that a step verified, and those that became part of the answer."""
        if not draft_tokens:
            return
        places = self._accepted_per_position
        places += [0] * (accepted_tokens - len(places))
        for place in range(accepted_tokens):
            places[place] += 1
        self._counters["spec_decode_num_drafts"] += 1
        self._counters["spec_decode_num_draft_tokens"] += draft_tokens
        self._counters["spec_decode_num_accepted_tokens"] += accepted_tokens

    def observe_gap(self, seconds: float, count: int = 1) -> None:
        """Count the time since the previous token, for `count` tokens with the same gap."""
        self._recent.advance()
        self._gaps.observe(seconds, count)

    def observe_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a prompt at its first token. Choices that share a prompt count it once."""
        self._recent.advance()
        counters = self._counters
        counters["prompt_tokens"] += prompt_tokens
        counters["prompt_tokens_cached"] += cached_tokens
        counters["prefix_cache_queries"] += prompt_tokens
        counters["prefix_cache_hits"] += cached_tokens

    def observe_first_token(self, seconds: float) -> None:
        """Count the time from the arrival of a request to its first token, when it has that token."""
        self._recent.advance()
        self._observe("time_to_first_token_seconds", seconds)

    def record(self, outcome: RequestOutcome) -> None:
        """Count the outcome of a request. Its times and sizes count where they are known and it ran to its end.

        With several choices the time per output token is that of a choice of mean length.
        """
        self._recent.advance()
        self._outcomes[outcome.outcome] += 1
        self._counters["queue_full"] += outcome.reason == "queue_full"
        self._acceptance.observe(outcome.draft_tokens or 0, outcome.accepted_draft_tokens or 0)
        if outcome.outcome not in COMPLETED or not outcome.num_choices:
            return
        queued, first, decoding = outcome.queue_seconds, outcome.first_token_seconds, outcome.decode_seconds
        prefill = None if queued is None or first is None else max(first - queued, 0.0)
        self._observe("e2e_request_latency_seconds", outcome.total_seconds)
        self._observe("request_queue_time_seconds", queued)
        self._observe("request_prefill_time_seconds", prefill)
        self._observe("request_decode_time_seconds", decoding)
        if prefill is not None and decoding is not None:
            self._observe("request_inference_time_seconds", prefill + decoding)
        self._observe("request_prompt_tokens", outcome.prompt_tokens)
        self._observe("request_generation_tokens", outcome.completion_tokens)
        if decoding is not None and outcome.completion_tokens is not None and outcome.num_choices:
            num_gaps = outcome.completion_tokens / outcome.num_choices - 1
            self._observe("request_time_per_output_token_seconds", decoding / num_gaps if num_gaps > 0 else None)

    def _snapshot(self, at: float) -> Snapshot:
        histograms = {name: self._histograms[name].copy() for name in _RECENT_HISTOGRAMS}
        return Snapshot(at, dict(self._counters), dict(self._outcomes), histograms)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)

    def render(self) -> tuple[bytes, str]:
        """The Prometheus text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def as_dict(self) -> dict[str, Any]:
        """The same figures for JSON, with plain names that carry their units."""
        reading = self._read()
        return {
            "model_name": self._model_name,
            "uptime_seconds": self._clock() - self._recent.began_at,
            "requests_running": reading.num_running,
            "requests_waiting": reading.num_waiting,
            "requests_by_outcome": dict(self._outcomes),
            "requests_refused_by_full_queue": self._counters["queue_full"],
            "page_usage_ratio": reading.page_usage,
            "pages": _pages(reading),
            "preemptions": reading.num_preemptions,
            "steps": self._counters["steps"],
            "restarts": self._counters["restarts"],
            "prompt_tokens": self._counters["prompt_tokens"],
            "cached_prompt_tokens": self._counters["prompt_tokens_cached"],
            "computed_prompt_tokens": self._counters["prompt_tokens_computed"],
            "generated_tokens": self._counters["generation_tokens"],
            "prefix_cache_queried_tokens": self._counters["prefix_cache_queries"],
            "prefix_cache_hit_tokens": self._counters["prefix_cache_hits"],
            "draft_tokens": self._counters["spec_decode_num_draft_tokens"],
            "accepted_draft_tokens": self._counters["spec_decode_num_accepted_tokens"],
            "accepted_draft_tokens_per_position": list(self._accepted_per_position),
            **{_PLAIN_NAMES.get(name, name): histogram.as_dict() for name, histogram in self._histograms.items()},
            "last_minute": self._recent.as_dict(),
            "startup_seconds": dict(self._startup_seconds),
            "cpu_seconds": dict(reading.cpu_seconds),
            "cache_config": dict(self._cache_config),
            **{sample.name: sample.value for family in self._process.collect() for sample in family.samples},
        }

    def collect(self) -> Iterator[Metric]:
        """Every metric of glint, for the registry."""
        reading = self._read()
        yield from self._collect_gauges(reading)
        yield from self._collect_counters(reading)
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = self._histograms[name]
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            names = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(names, map(float, histogram.cumulative()), strict=True))
            family.add_metric([self._model_name], buckets, sum_value=histogram.total)
            yield family
        info = InfoMetricFamily(PREFIX + "cache_config", "Settings of the page cache.", labels=["model_name"])
        info.add_metric([self._model_name], self._cache_config)
        yield info

    def _collect_gauges(self, reading: EngineReading) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests that run.", reading.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for their first step.", reading.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the pages in use; 1 is all of them.", reading.page_usage)
        yield self._labelled(GaugeMetricFamily, "pages", "Pages by state.", "state", _pages(reading))
        text = "Seconds that each phase of the start took."
        yield self._labelled(GaugeMetricFamily, "startup_seconds", text, "phase", self._startup_seconds)

    def _collect_counters(self, reading: EngineReading) -> Iterator[Metric]:
        values = self._counters | {"num_preemptions": reading.num_preemptions}
        texts = _COUNTERS | {"num_preemptions": "Requests that gave up their pages for another."}
        for name, value in values.items():
            family = CounterMetricFamily(PREFIX + name, texts[name], labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        successes = dict.fromkeys(FINISHED_REASONS.values(), 0)
        for outcome, reason in FINISHED_REASONS.items():
            successes[reason] += self._outcomes[outcome]
        places = {str(place): count for place, count in enumerate(self._accepted_per_position)}
        accepted = "Draft tokens that are part of an answer, by their place among the drafts of a request."
        for name, text, label, by_label in (
            ("spec_decode_num_accepted_tokens_per_pos", accepted, "position", places),
            ("request_success", "Requests that ran, by how they ended.", "finished_reason", successes),
            ("requests", "All requests, by outcome.", "outcome", self._outcomes),
            ("server_cpu_seconds", "Processor time of the server's threads.", "thread", reading.cpu_seconds),
        ):
            yield self._labelled(CounterMetricFamily, name, text, label, by_label)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _labelled(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(PREFIX + name, text, labels=["model_name", label])
        for value_label, value in values.items():
            family.add_metric([self._model_name, value_label], value)
        return family


def _pages(reading: EngineReading) -> dict[str, int]:
    return {"free": reading.pages_free, "held": reading.pages_held, "cached": reading.pages_cached}
