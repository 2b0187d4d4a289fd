"""The figures of a load and the table people expect of them: the rows, the order and the keys of `vllm bench serve`.

TTFT is from sending to the first chunk with text, E2EL to the last chunk, TPOT is (E2EL - TTFT) / (output tokens - 1)
of a request, ITL every gap between two chunks with text. All four are of complete requests only. The throughput counts
every output token that arrived within the time: those of complete requests by the server's usage, those of requests
that were cut at the end by their chunks, times the tokens per chunk of the complete ones.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from glint.bench.stream import StreamedAnswer

ROUNDING_SECONDS = 0.02
COUNTERS = {
    "generation_tokens": ("generation_tokens", "generated_tokens"),
    "steps": ("steps",),
    "step_tokens": ("step_tokens",),
    "step_items": ("step_items",),
    "draft_tokens": ("draft_tokens",),
    "accepted_draft_tokens": ("accepted_draft_tokens",),
}
CPU_NAMES = ("server_cpu_seconds", "cpu_seconds")


@dataclass(frozen=True)
class ServerCounters:
    """Counters of a glint server: what it generated, its steps, and the CPU seconds of its threads by name.

    What a server does not tell is None.
    """

    generation_tokens: float | None
    steps: float | None
    step_tokens: float | None
    step_items: float | None
    cpu_seconds: Mapping[str, float]
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None

    @classmethod
    def read(cls, document: Any) -> "ServerCounters | None":
        """Reads the answer of /stats, where a counter is a number or the sum of a distribution.

        None if it holds none of the counters.
        """
        if not isinstance(document, dict):
            return None
        values = {name: _number(_first(document, spellings)) for name, spellings in COUNTERS.items()}
        threads = _first(document, CPU_NAMES)
        read = {name: _number(value) for name, value in threads.items()} if isinstance(threads, dict) else {}
        seconds = {name: value for name, value in read.items() if value is not None}
        if not seconds and not any(value is not None for value in values.values()):
            return None
        return cls(**values, cpu_seconds=seconds)

    def since(self, before: "ServerCounters") -> "ServerCounters":
        """The difference to an earlier reading."""
        values = {name: _difference(getattr(self, name), getattr(before, name)) for name in COUNTERS}
        seconds = {name: value - before.cpu_seconds.get(name, 0.0) for name, value in self.cpu_seconds.items()}
        return ServerCounters(**values, cpu_seconds=seconds)


@dataclass(frozen=True)
class Measurement:
    """The raw data of a load. Times are in seconds of one clock, on which the load began at `start`."""

    base_url: str
    model: str
    endpoint: str
    prompts: str
    concurrency: int
    request_rate: float | None
    prompt_tokens: int
    output_tokens: int
    start: float
    seconds: float
    answers: tuple[StreamedAnswer, ...]
    has_given_up: bool
    client_cpu_seconds: float
    server: ServerCounters | None


@dataclass(frozen=True)
class Distribution:
    """Milliseconds, summed up; `values` are sorted."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> "Distribution | None":
        """Sums up values in milliseconds; None if there are none."""
        if not values:
            return None
        array = np.sort(np.asarray(values))
        points = tuple((point, float(np.percentile(array, point))) for point in percentiles)
        return cls(float(array.mean()), float(np.median(array)), float(array.std()), points, tuple(array.tolist()))


@dataclass(frozen=True)
class LoadReport:
    """Every figure of one load. Throughputs are per second of the whole load."""

    measured: Measurement
    completed: int
    failed: int
    cut: int
    errors: tuple[tuple[str, int], ...]
    input_tokens: int
    output_tokens: float
    output_tokens_of_cut: float
    mean_input_tokens: float | None
    mean_output_tokens: float | None
    off_input_length: int
    off_output_length: int
    without_usage: int
    output_per_second: tuple[float, ...]
    peak_concurrent: int
    good: int | None
    latencies: Mapping[str, Distribution | None]

    @property
    def request_throughput(self) -> float:
        """Complete requests per second."""
        return self.completed / self.measured.seconds

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.measured.seconds

    @property
    def total_throughput(self) -> float:
        """Input and output tokens per second."""
        return (self.input_tokens + self.output_tokens) / self.measured.seconds

    @property
    def goodput(self) -> float | None:
        """Requests per second that met every limit; None without limits."""
        return None if self.good is None else self.good / self.measured.seconds

    @property
    def peak_output(self) -> float:
        """Output tokens of the best whole second; of the only part of one if the load was shorter."""
        return max(self.output_per_second, default=0.0)

    def median(self, name: str) -> float | None:
        """The median of a latency in milliseconds, None if nothing was complete."""
        found = self.latencies[name]
        return None if found is None else found.median


def summarise(measured: Measurement, percentiles: Sequence[float], goodput: Sequence[tuple[str, float]]) -> LoadReport:
    """Works out the figures of a load; `goodput` are limits in milliseconds by latency name."""
    complete = [answer for answer in measured.answers if answer.failure is None and answer.is_finished]
    failed = [answer for answer in measured.answers if answer.failure is not None]
    cut = [answer for answer in measured.answers if answer.failure is None and not answer.is_finished]
    counts = [output_count(answer) for answer in complete]
    num_chunks = sum(len(answer.text_times) for answer in complete)
    per_chunk = sum(counts) / num_chunks if num_chunks else 1.0
    weights = [per_chunk_of(answer) for answer in complete] + [per_chunk] * len(cut)
    inputs = [answer.prompt_tokens for answer in complete if answer.prompt_tokens is not None]
    begun = sum(1 for answer in cut if answer.text_times)
    of_cut = per_chunk * sum(len(answer.text_times) for answer in cut)
    singles = [latencies_of(answer) for answer in complete]
    values = {
        "ttft": [single["ttft"] for single in singles],
        "tpot": [single["tpot"] for single in singles if "tpot" in single],
        "itl": [gap for answer in complete for gap in gaps_of(answer)],
        "e2el": [single["e2el"] for single in singles],
    }
    return LoadReport(
        measured=measured,
        completed=len(complete),
        failed=len(failed),
        cut=len(cut),
        errors=tuple(Counter(str(answer.failure) for answer in failed).most_common()),
        input_tokens=sum(inputs) + begun * (measured.prompt_tokens or round(_mean(inputs) or 0)),
        output_tokens=sum(counts) + of_cut,
        output_tokens_of_cut=of_cut,
        mean_input_tokens=_mean(inputs),
        mean_output_tokens=_mean(counts),
        off_input_length=sum(1 for count in inputs if count != measured.prompt_tokens),
        off_output_length=sum(1 for count in counts if count != measured.output_tokens),
        without_usage=sum(1 for answer in complete if answer.output_tokens is None),
        output_per_second=tokens_by_second(measured, complete + cut, weights),
        peak_concurrent=peak_concurrency(measured),
        good=sum(1 for single in singles if is_good(single, goodput)) if goodput else None,
        latencies={name: Distribution.of(values[name], percentiles) for name in values},
    )


def output_count(answer: StreamedAnswer) -> int:
    """Output tokens by the server's usage, else by chunks."""
    return len(answer.text_times) if answer.output_tokens is None else answer.output_tokens


def per_chunk_of(answer: StreamedAnswer) -> float:
    """Tokens that each chunk of a complete answer stands for."""
    return output_count(answer) / len(answer.text_times) if answer.text_times else 0.0


def gaps_of(answer: StreamedAnswer) -> list[float]:
    """Milliseconds between chunks with text."""
    times = answer.text_times
    return [(later - earlier) * 1e3 for earlier, later in pairwise(times)]


def latencies_of(answer: StreamedAnswer) -> dict[str, float]:
    """TTFT, E2EL and, for two tokens and more, TPOT of a complete answer, in milliseconds.

    An answer whose tokens make no text has its first token when it ends.
    """
    start, end = answer.started or 0.0, answer.last or 0.0
    first = answer.text_times[0] if answer.text_times else end
    found = {"ttft": (first - start) * 1e3, "e2el": (end - start) * 1e3}
    count = output_count(answer)
    if count > 1:
        found["tpot"] = (end - first) * 1e3 / (count - 1)
    return found


def is_good(single: Mapping[str, float], limits: Sequence[tuple[str, float]]) -> bool:
    """Whether a request met every limit; one token alone has no TPOT to exceed."""
    return all(single.get(name, 0.0) <= most for name, most in limits)


def tokens_by_second(
    measured: Measurement, answers: Sequence[StreamedAnswer], weights: Sequence[float]
) -> tuple[float, ...]:
    """Output tokens in every whole second from the start, or in the only part of one if the load was shorter."""
    num_bins = max(1, math.floor(measured.seconds + ROUNDING_SECONDS))
    bins = [0.0] * num_bins
    for answer, weight in zip(answers, weights, strict=True):
        for time in answer.text_times:
            second = int(time - measured.start)
            if second < num_bins:
                bins[second] += weight
    return tuple(bins)


def peak_concurrency(measured: Measurement) -> int:
    """The most requests that were in flight within one second, as vLLM counts: begun before its end, ended after."""
    bins: Counter[int] = Counter()
    for answer in measured.answers:
        if answer.started is not None and answer.failure is None:
            end = answer.last if answer.is_finished and answer.last is not None else measured.start + measured.seconds
            for second in range(int(answer.started - measured.start), int(end - measured.start) + 1):
                bins[second] += 1
    return max(bins.values(), default=0)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _first(document: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((document[name] for name in names if name in document), None)


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = value.get("sum")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
