"""The reliability runs can fail: every promise is broken here once, on figures made for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from glint.native import abi
from tests.reliability import counts, faults, faulty_server
from tests.reliability.client import Answer
from tests.reliability.command import main
from tests.reliability.counts import Ended
from tests.reliability.fuzz_cases import Case, Corpus, judge_body, judge_raw
from tests.reliability.load import Load, Sent, Share
from tests.reliability.mix import Ask, Mix, content_of
from tests.reliability.overload import judge as judge_overload
from tests.reliability.report import MEBIBYTE, MemoryTrend, PartReport, percentile
from tests.reliability.soak import judge as judge_soak

NUM_REQUESTS = 40
OUTCOMES = ("finished", "stopped", "length", "cancelled", "refused")


def log_lines() -> list[dict[str, str]]:
    """Lines of requests that ended in every way."""
    return [
        {"request_id": f"r-{index}", "outcome": OUTCOMES[index % len(OUTCOMES)], "reason": "-"}
        for index in range(NUM_REQUESTS)
    ]


def client_ends() -> list[Ended]:
    """What the clients of the same requests saw; who left early was told no id."""
    kinds = [counts.kind_of(line["outcome"]) for line in log_lines()]
    return [Ended(kind, None if kind == "cancelled" else f"r-{index}") for index, kind in enumerate(kinds)]


def counted(lines: list[dict[str, str]]) -> dict[str, int]:
    """The metrics that belong to the lines."""
    return {outcome: sum(line["outcome"] == outcome for line in lines) for outcome in (*OUTCOMES, "failed", "lost")}


def broken(lines: list[dict[str, str]], metrics: dict[str, int]) -> list[str]:
    """The promises that the counts break."""
    report = PartReport("soak", "")
    counts.tell(report, client_ends(), lines, metrics)
    return [promise.text for promise in report.broken]


def test_equal_counts_hold() -> None:
    assert broken(log_lines(), counted(log_lines())) == []


@pytest.mark.parametrize("index", range(len(OUTCOMES)))
def test_a_line_removed_is_found(index: int) -> None:
    lines = log_lines()
    del lines[index]
    assert any("outcome line" in text for text in broken(lines, counted(log_lines())))


def test_a_line_written_twice_is_found() -> None:
    assert any("outcome line" in text for text in broken([*log_lines(), log_lines()[0]], counted(log_lines())))


@pytest.mark.parametrize("outcome", ["failed", "lost", "refused", "cancelled"])
def test_a_line_of_another_kind_is_found(outcome: str) -> None:
    lines = log_lines()
    lines[0]["outcome"] = outcome
    assert any("outcome line" in text for text in broken(lines, counted(lines)))


def test_a_lost_request_in_place_of_a_cancelled_one_is_found() -> None:
    lines = log_lines()
    lines[3]["outcome"] = "lost"
    assert len(broken(lines, counted(lines))) >= 2


def test_an_answer_that_was_whole_before_its_client_left_is_no_difference() -> None:
    lines = log_lines()
    lines[3]["outcome"] = "length"
    assert broken(lines, counted(lines)) == []


def test_metrics_that_differ_are_found() -> None:
    assert broken(log_lines(), counted(log_lines()[1:]))


def memory(bytes_per_second: float, jump: int = 0) -> list[str]:
    """The promises that memory of this slope breaks, with a warm-up that does not count."""
    warm = [(float(at), 50 * MEBIBYTE * at) for at in range(40)]
    rest = [(float(at), int(2000 * MEBIBYTE + jump * (at > 70) + bytes_per_second * at)) for at in range(40, 101)]
    report = PartReport("soak", "")
    MemoryTrend.of([*warm, *rest]).tell(report, 16.0)
    return [promise.text for promise in report.broken]


def test_memory_that_grows_is_found() -> None:
    assert memory(0) == memory(0.2 * MEBIBYTE) == []
    assert memory(0.4 * MEBIBYTE) and memory(0, jump=64 * MEBIBYTE)


def answer(status: int | None, body: bytes, ending: Any = "whole", headers: str = "") -> Answer:
    """An answer as if it had come."""
    made = Answer()
    made.status, made.ending = status, ending
    made.head = f"HTTP/1.1 {status} X\r\n{headers}".encode()
    made.body += body
    return made


def test_the_soak_judges_answers() -> None:
    good, bad = Ask("/v1/completions", b"{}"), Ask("/v1/completions", b"{", is_bad=True)
    whole = b'{"choices":[{"index":0,"text":"a"}]}'
    assert judge_soak(good, answer(200, whole))[:2] == ("finished", None)
    assert judge_soak(good, answer(200, b"", "left"))[:2] == ("cancelled", None)
    assert judge_soak(bad, answer(400, b""))[:2] == ("refused", None)
    for ask, came, kind in (
        (good, answer(500, b""), "failed"),
        (good, answer(200, whole, "cut"), "failed"),
        (good, answer(None, b"", "late"), "failed"),
        (good, answer(200, b'{"error":{"message":"no"}}'), "failed"),
        (good, answer(400, b"{}"), "refused"),
        (bad, answer(200, whole), "finished"),
    ):
        found = judge_soak(ask, came)
        assert found[0] == kind and found[1] is not None
    strict = Ask("/v1/completions", b"{}", has_schema=True)
    unfit = b'{"choices":[{"index":0,"text":"{}","finish_reason":"stop"}]}'
    assert judge_soak(strict, answer(200, unfit))[1] is not None


def test_content_is_the_same_however_a_stream_is_cut_and_differs_by_one_token() -> None:
    def events(*pieces: str) -> list[Any]:
        made = [{"id": str(len(pieces)), "choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        return [*made, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]

    assert content_of(events("ab", "c")) == content_of(events("a", "b", "c"))
    assert content_of(events("ab", "c")) != content_of(events("ab", "d"))
    one = {"choices": [{"index": 0, "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}]}
    other = {"choices": [{"index": 0, "logprobs": {"content": [{"token": "a", "logprob": -0.5000001}]}}]}
    assert content_of([one]) != content_of([other])


def test_the_mix_has_every_kind_and_is_drawn_by_its_seed() -> None:
    asks = [Mix(random.Random(seed), "m", 40).draw() for seed in range(600)]
    assert asks == [Mix(random.Random(seed), "m", 40).draw() for seed in range(600)]
    assert {ask.path for ask in asks} == {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
    for is_there in (
        any(ask.is_bad for ask in asks),
        any(ask.leaves_at is not None for ask in asks),
        any(ask.leaves_after is not None for ask in asks),
        any(ask.has_schema for ask in asks),
        any(ask.is_remembered and b'"stream": true' in ask.body for ask in asks),
    ):
        assert is_there


def test_the_fuzzing_judges_answers() -> None:
    case = Case("/generate", b"")
    fine = b'{"error":{"message":"the field \'prompt\' is missing","param":"prompt"}}'
    assert judge_body(case, answer(400, fine)) == []
    assert judge_body(case, answer(503, b"{}", headers="Retry-After: 1")) == []
    for came in (answer(500, fine), answer(503, fine), answer(504, fine), answer(400, b"no"), answer(None, b"", "cut")):
        assert judge_body(case, came)
    assert judge_raw(b"") == judge_raw(b"HTTP/1.1 400 Bad Request\r\n\r\n") == []
    assert judge_raw(b"HTTP/1.1 500 Internal Server Error\r\n\r\n") and judge_raw(b"garbage")


def test_cases_are_made_by_seed_and_number() -> None:
    bodies = (("/generate", b'{"prompt":"a","max_tokens":1,"stop":["a"]}'), ("/tokenize", b'{"prompt":"b"}'))
    first, again, other = (Corpus(seed, bodies, (b"GET / HTTP/1.1\r\n\r\n",)) for seed in (1, 1, 2))
    assert [first.body(number) for number in range(200)] == [again.body(number) for number in range(200)]
    assert [first.stream(number) for number in range(200)] == [again.stream(number) for number in range(200)]
    assert [first.body(number) for number in range(200)] != [other.body(number) for number in range(200)]
    assert len({first.body(number).message for number in range(200)}) > 100


def load(tpot: float, refusal: float, num_failed: int = 0, retry_after: str | None = "1") -> Load:
    """A load of a hundred seconds whose served requests have this time per token."""
    served = [Sent(at, at + 0.1, at + 0.1 + 99 * tpot, 200, "whole", 100, None, "") for at in range(100)]
    refused = [Sent(at, at, at + refusal, 429, "whole", 0, retry_after, "") for at in range(100)]
    failed = [Sent(1.0, None, 1.1, 500, "whole", 0, None, "no")] * num_failed
    return Load([Share(0.0, 100.0, [*served, *refused, *failed])])


@pytest.mark.parametrize(
    ("at_4x", "num_broken"),
    [
        (load(0.01, 0.01), 0),
        (load(0.0115, 0.01), 1),
        (load(0.01, 0.08), 1),
        (load(0.01, 0.01, num_failed=1), 1),
        (load(0.01, 0.01, retry_after=None), 1),
    ],
)
def test_overload_judges_speed_refusals_and_failures(at_4x: Load, num_broken: int) -> None:
    report = PartReport("overload", "")
    judge_overload(report, load(0.01, 0.01), {4: at_4x}, judges_speed=True)
    assert len(report.broken) == num_broken, report.broken


def fault_lines(count: int) -> list[dict[str, str]]:
    """Lines of requests that a dead engine left open."""
    return [
        {"request_id": f"r-{index}", "outcome": "lost", "completion_tokens": "-", "reason": "-"}
        for index in range(count)
    ]


def test_a_request_that_a_fault_left_without_a_line_is_found() -> None:
    named = "X-Request-Id: r-{}"
    answers = [answer(200, b"", "cut", named.format(index)) for index in range(faults.NUM_REQUESTS)]
    assert faults.judge(answers, 0, fault_lines(faults.NUM_REQUESTS), 1.0, 1.0).wrong == []
    assert faults.judge(answers, 0, fault_lines(faults.NUM_REQUESTS - 1), 1.0, 1.0).wrong
    assert faults.judge(answers, 0, [*fault_lines(faults.NUM_REQUESTS), *fault_lines(1)], 1.0, 1.0).wrong
    report = PartReport("faults", "")
    table = report.table("faults", *faults.COLUMNS)
    outcome = faults.judge(answers[1:], 1, fault_lines(faults.NUM_REQUESTS), None, None)
    outcome.has_happened = False
    faults.tell(report, table, faults.FAULTS[0], outcome, 10.0)
    assert len(report.broken) == 3


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 201)]
    assert [percentile(values, percent) for percent in (50, 99, 100)] == [100.0, 198.0, 200.0]
    assert percentile([], 50) is None and percentile([3.0], 99) == 3.0


def test_a_recorded_run_becomes_a_document_and_its_broken_promise_the_exit_code(tmp_path: Path) -> None:
    report = PartReport("soak", "Did it.")
    report.table("load", "figure", "value").add("requests", 12345)
    report.promise("no request failed", True)
    record, page = tmp_path / "run.json", tmp_path / "page.md"

    def write() -> list[str]:
        facts = {"machine": "M", "commit": "c"}
        record.write_text(json.dumps({"run": facts, "parts": [report.as_dict()]}))
        return ["--recorded", str(record), "--markdown", str(page)]

    assert main(write()) == 0
    assert "| requests | 12,345 |" in page.read_text() and "| commit | c |" in page.read_text()
    report.promise("memory is flat", False)
    assert main(write()) == 1
    assert "| memory is flat | NO |" in page.read_text()


def test_ranks_of_a_fault_share_one_gpu_whatever_the_engine_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of an engine already name `shares_devices`; the server of the faults sets it all the same."""
    monkeypatch.setattr(abi, "sized", abi.sized)
    faulty_server.share_one_gpu()
    assert abi.sized(abi.EngineOptions, num_ranks=3, shares_devices=0).shares_devices == 1
    assert abi.sized(abi.EngineOptions, num_ranks=3).num_ranks == 3
