"""The serving bench against a real server with a scripted clock: what it measures is what the server did."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from glint.bench.load import LoadSettings, run_load
from glint.bench.prompts import read_questions
from glint.bench.report import LoadReport
from glint.bench.serving import settings_of
from glint.bench.serving_flags import fill_defaults
from glint.bench.stream import Endpoint
from glint.bench.table import render
from glint.cli import make_parser
from glint.errors import RequestError
from tests.pure.openai_endpoint import MODEL, TEMPLATE_TOKENS, Script, ScriptedServer, serving

SLACK_MS = 40.0
SHORT = LoadSettings(
    "", concurrency=2, duration_seconds=None, num_prompts=6, prompt_tokens=20, output_tokens=5, warmup=0
)


def measure(server: ScriptedServer, **changes: Any) -> LoadReport:
    return run_load(replace(SHORT, base_url=server.url, **changes))


def median_of(report: LoadReport, name: str) -> float:
    found = report.median(name)
    assert found is not None
    return found


def test_times_are_those_of_the_server() -> None:
    with serving(Script(first=0.08, gap=0.03)) as server:
        report = measure(server)
        seen = server.seen
    assert (report.completed, report.failed, report.cut) == (6, 0, 0)
    firsts = median((one.written[0] - one.received) * 1e3 for one in seen)
    wholes = median((one.written[-1] - one.received) * 1e3 for one in seen)
    assert firsts >= 80.0 and wholes >= 200.0
    assert median_of(report, "ttft") == pytest.approx(firsts, abs=SLACK_MS)
    assert median_of(report, "e2el") == pytest.approx(wholes, abs=SLACK_MS)
    assert median_of(report, "tpot") == pytest.approx((wholes - firsts) / 4, abs=SLACK_MS / 4)
    assert median_of(report, "itl") == pytest.approx((wholes - firsts) / 4, abs=SLACK_MS / 4)
    itl = report.latencies["itl"]
    assert itl is not None and len(itl.values) == 6 * 4
    assert report.output_tokens == 30 and report.input_tokens == 120
    assert report.output_throughput == pytest.approx(30 / report.measured.seconds)
    assert 0.6 <= report.measured.seconds < 2.0


def test_several_tokens_in_a_chunk_raise_itl_and_not_tpot() -> None:
    with serving(Script(first=0.01, gap=0.06, tokens_per_chunk=3)) as server:
        report = measure(server, output_tokens=9, num_prompts=4)
    assert report.output_tokens == 36
    assert median_of(report, "itl") >= 60.0
    assert median_of(report, "tpot") == pytest.approx(120.0 / 8, abs=SLACK_MS / 8)


@pytest.mark.parametrize(
    ("framing", "endpoint", "separators"),
    [
        ("chunked", "completions", (",", ":")),
        ("chunked", "chat", (", ", ": ")),
        ("close", "completions", (", ", ": ")),
        ("dribble", "chat", (",", ":")),
    ],
)
def test_every_framing_and_route_gives_every_token(framing: Any, endpoint: Any, separators: Any) -> None:
    with serving(Script(framing=framing, separators=separators)) as server:
        report = measure(server, endpoint=endpoint)
        connections = server.num_connections
    assert (report.completed, report.errors) == (6, ())
    assert (report.mean_input_tokens, report.mean_output_tokens) == (20.0, 5.0)
    assert (report.off_input_length, report.off_output_length, report.without_usage) == (0, 0, 0)
    assert all(len(answer.text_times) == 5 for answer in report.measured.answers)
    assert connections > 6


def test_the_role_chunk_of_a_chat_is_no_token() -> None:
    with serving(Script(first=0.1)) as server:
        report = measure(server, endpoint="chat")
    assert median_of(report, "ttft") >= 100.0


def test_a_duration_cuts_what_is_under_way_and_counts_what_arrived() -> None:
    with serving(Script(first=0.05, gap=0.05)) as server:
        report = measure(server, concurrency=3, num_prompts=None, duration_seconds=1.6, output_tokens=20)
        written = sum(1 for one in server.seen for _ in one.written)
    assert (report.failed, report.cut) == (0, 3)
    assert report.output_tokens == pytest.approx(written, abs=3)
    assert report.output_tokens_of_cut == report.output_tokens - 20 * report.completed
    assert report.input_tokens == 20 * (report.completed + report.cut)
    assert sum(report.output_per_second) <= report.output_tokens


def test_warm_up_is_sent_and_not_counted() -> None:
    with serving(Script()) as server:
        report = measure(server, warmup=4)
        num_seen = len(server.seen)
    assert (num_seen, report.completed) == (10, 6)
    assert len(report.measured.answers) == 6


def test_prompts_differ_within_a_load_and_are_the_same_for_the_same_seed() -> None:
    def prompts(**changes: Any) -> list[str]:
        with serving(Script()) as server:
            measure(server, concurrency=1, **changes)
            return [str(one.body["prompt"]) for one in server.seen]

    first = prompts()
    assert len(set(first)) == 6
    assert prompts() == first
    assert not set(prompts(seed=1)) & set(first)
    assert not set(prompts(label="second")) & set(first)


def test_requests_ask_for_fixed_lengths_and_usage() -> None:
    with serving(Script()) as server:
        measure(server, num_prompts=1, temperature=0.5)
        measure(server, num_prompts=1, ignores_eos=False, model="other")
        first, second = (one.body for one in server.seen)
    assert (first["model"], second["model"]) == (MODEL, "other")
    assert first["ignore_eos"] is True and "ignore_eos" not in second
    assert first["stream_options"] == {"include_usage": True}
    assert (first["max_tokens"], first["temperature"], len(first["prompt"])) == (5, 0.5, 20)


def test_questions_are_asked_in_chat_until_the_answer_ends() -> None:
    chosen = make_parser().parse_args(["bench", "serve", "--prompts", "questions", "--gen-len", "7"])
    fill_defaults(chosen)
    settings = settings_of(chosen, "http://127.0.0.1:1")
    assert (settings.endpoint, settings.ignores_eos, settings.prompt_tokens) == ("chat", False, 0)
    asked: dict[int, list[str]] = {}
    for seed in (0, 0, 1):
        with serving(Script()) as server:
            changes: dict[str, Any] = {
                "num_prompts": 5,
                "duration_seconds": None,
                "warmup": 0,
                "concurrency": 1,
                "seed": seed,
            }
            report = run_load(replace(settings, base_url=server.url, **changes))
            bodies = [one.body for one in server.seen]
        found = [body["messages"][0]["content"] for body in bodies]
        assert asked.setdefault(seed, found) == found and set(found) <= set(read_questions())
        assert all("ignore_eos" not in body and body["max_tokens"] == 7 for body in bodies)
        assert all((body["temperature"], body["repetition_penalty"]) == (0.0, 1.0) for body in bodies)
        assert report.completed == 5 and "Most output tokens of a request:         7" in render(report)
        assert "Requests not of" not in render(report)
    assert asked[0] != asked[1]


def test_lengths_that_were_missed_are_counted() -> None:
    with serving(Script(tokens_short=2)) as server:
        report = measure(server)
    assert (report.off_output_length, report.mean_output_tokens) == (6, 3.0)


def test_without_usage_chunks_are_counted_and_it_says_so() -> None:
    with serving(Script(has_usage=False)) as server:
        report = measure(server)
    assert (report.without_usage, report.output_tokens, report.mean_input_tokens) == (6, 30, None)


def test_a_rate_spreads_the_requests() -> None:
    with serving(Script()) as server:
        report = measure(server, request_rate=20.0, num_prompts=20, concurrency=8)
    assert report.completed == 20
    assert report.measured.seconds > 0.4


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(status=429), "HTTP 429: the queue is full"),
        (Script(error_at=2), "error in the stream: the engine stopped"),
        (Script(drop_at=2), "the server closed the connection before the answer was complete"),
    ],
)
def test_failures_are_counted_and_named(script: Script, message: str) -> None:
    with serving(script) as server:
        report = measure(server, num_prompts=4)
    assert (report.completed, report.failed) == (0, 4)
    [(text, count)] = report.errors
    assert message in text and count == 4


def test_nothing_but_failures_ends_the_load_early() -> None:
    with serving(Script(status=503)) as server:
        report = measure(server, num_prompts=None, duration_seconds=30.0)
    assert report.measured.has_given_up
    assert report.measured.seconds < 5.0
    assert report.failed >= 6


def test_a_server_that_is_slower_than_the_timeout_is_a_failure() -> None:
    with serving(Script(first=5.0)) as server:
        report = measure(server, num_prompts=1, timeout_seconds=0.3)
    assert report.errors == (("no complete answer within 0.3 s", 1),)


def test_a_refused_connection_names_the_url_and_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RequestError, match=rf"{url} does not answer \(connection refused\).*--base-url"):
            run_load(replace(SHORT, base_url=url))


def test_the_key_is_sent_and_a_wrong_one_is_named() -> None:
    with serving(Script(api_key="secret")) as server:
        assert measure(server, api_key="secret").completed == 6
        with pytest.raises(RequestError, match=r"401: .*wrong key.*--api-key"):
            measure(server)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://h/?a=1"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="is no base URL"):
        Endpoint.parse(url)


def test_a_base_url_may_end_with_the_version() -> None:
    for url in ("http://host:9", "http://host:9/", "http://host:9/v1", "http://host:9/v1/"):
        assert Endpoint.parse(url).message("GET", "/v1/models", None).startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert "secret" not in repr(Endpoint.parse("http://host", "secret"))


def test_llama_form_of_tokenize_and_none_at_all(sample_model: Path) -> None:
    with serving(Script(tokenize="content")) as server:
        assert measure(server).off_input_length == 0
    with serving(Script(tokenize="absent")) as server:
        with pytest.raises(RequestError, match=r"no /tokenize.*20 tokens.*--tokenizer DIR"):
            measure(server)
        assert measure(server, tokenizer=sample_model).mean_input_tokens == 20.0


def test_a_chat_prompt_shorter_than_its_template_is_refused() -> None:
    with serving(Script()) as server, pytest.raises(RequestError, match=f"takes {TEMPLATE_TOKENS + 1} tokens"):
        measure(server, endpoint="chat", prompt_tokens=TEMPLATE_TOKENS)


def test_counters_of_the_server_are_those_of_the_load() -> None:
    before = {
        "generation_tokens": 100,
        "steps": 10,
        "step_tokens": 50,
        "server_cpu_seconds": {"loop": 1.0, "engine": 2},
    }
    after = {
        "generation_tokens": 130,
        "steps": 20,
        "step_tokens": 170,
        "server_cpu_seconds": {"loop": 1.3, "engine": 5},
    }
    with serving(Script(stats=[before, after])) as server:
        counters = measure(server).measured.server
    assert counters is not None
    assert (counters.generation_tokens, counters.steps, counters.step_tokens) == (30, 10, 120)
    assert counters.step_items is None
    assert counters.cpu_seconds == pytest.approx({"loop": 0.3, "engine": 3.0})
    with serving(Script(stats=[{"unrelated": 1}, {"unrelated": 2}])) as server:
        assert measure(server).measured.server is None


def test_the_event_loop_of_python_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with serving(Script(framing="dribble")) as server:
        report = measure(server)
        cut = measure(server, num_prompts=None, duration_seconds=0.3, output_tokens=100_000)
    assert (report.completed, report.output_tokens) == (6, 30)
    assert (cut.completed, cut.failed, cut.cut) == (0, 0, 2)
    assert cut.output_tokens > 10
