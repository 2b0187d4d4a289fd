"""Exactly one line per request, that nothing a client sends can split, forge or suppress."""

import asyncio
import dataclasses
import gc
import json
import logging
import re
import shlex
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glint.server.outcomes import OutcomeLog, RequestOutcome, RequestRecord
from glint.server.process.logs import JsonFormatter, is_no_cancellation

FULL = RequestOutcome(
    request_id="chatcmpl-1",
    route="/v1/chat/completions",
    outcome="finished",
    reason="eos",
    status=200,
    num_choices=2,
    prompt_tokens=10,
    cached_tokens=4,
    completion_tokens=7,
    queue_seconds=0.5,
    first_token_seconds=0.75,
    decode_seconds=1.0,
    total_seconds=1.8125,
    draft_tokens=9,
    accepted_draft_tokens=5,
)


def format_json(outcome: RequestOutcome) -> str:
    """The line of an outcome in a JSON log."""
    return JsonFormatter().format(logging.LogRecord("glint.requests", logging.INFO, "", 0, outcome, (), None))


def test_the_line_is_stable() -> None:
    assert str(FULL) == (
        "request_id=chatcmpl-1 route=/v1/chat/completions outcome=finished reason=eos status=200 num_choices=2 "
        "prompt_tokens=10 cached_tokens=4 completion_tokens=7 queue_seconds=0.500000 first_token_seconds=0.750000 "
        "decode_seconds=1.000000 total_seconds=1.812500 user=- draft_tokens=9 accepted_draft_tokens=5"
    )
    line = json.loads(format_json(FULL))
    assert [line.pop(name) for name in ("level", "logger")] == ["info", "glint.requests"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == dataclasses.asdict(FULL)


def test_what_is_not_known_is_said() -> None:
    outcome = RequestOutcome("cmpl-2", "/v1/completions", "refused", reason="-")
    line = str(outcome)
    assert line.startswith('request_id=cmpl-2 route=/v1/completions outcome=refused reason="-" status=- ')
    assert json.loads(format_json(outcome))["total_seconds"] is None


def test_an_outcome_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'gone'"):
        RequestOutcome("x", "/", "gone")


@given(st.text(max_size=250), st.text(max_size=250))
def test_client_text_can_neither_end_the_line_nor_forge_a_pair(reason: str, route: str) -> None:
    outcome = dataclasses.replace(FULL, reason=reason, route=route)
    for line in (str(outcome), format_json(outcome)):
        assert len(line.splitlines()) == 1
        assert line.isascii() and line.isprintable()
    record = json.loads(format_json(outcome))
    assert (record["reason"], record["route"]) == (reason[:200], route[:200])
    pairs = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)(?: |$)', str(outcome))
    assert [name for name, _ in pairs] == [field.name for field in dataclasses.fields(RequestOutcome)]
    values = dict(pairs)
    for name, text in (("reason", reason), ("route", route)):
        value = values[name]
        assert (json.loads(value) if value.startswith('"') else value) == text[:200]


def test_client_text_is_cut_and_only_a_plain_word_stands_bare() -> None:
    for length in (199, 200, 201, 1000):
        outcome = dataclasses.replace(FULL, reason="x" * length)
        assert f" reason={'x' * min(length, 200)} " in str(outcome)
        assert json.loads(format_json(outcome))["reason"] == "x" * min(length, 200)
    for text in ("status=500", "a b", "-"):
        assert f' reason="{text}" ' in str(dataclasses.replace(FULL, reason=text))


@pytest.mark.parametrize("text", ["a\nrequest_id=x", "a\r\x1b[2J", "x status=500", '"', "\u2028", "\x7f", "\x85", ""])
def test_known_injections(text: str) -> None:
    line = str(dataclasses.replace(FULL, reason=text))
    assert len(line.splitlines()) == 1 and line.isprintable()
    assert len(shlex.split(line)) == len(dataclasses.fields(RequestOutcome))


def test_one_line_per_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="glint.requests")
    OutcomeLog().write(FULL)
    OutcomeLog().write(dataclasses.replace(FULL, outcome="failed"))
    OutcomeLog().write(dataclasses.replace(FULL, outcome="lost"))
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("glint.requests", "INFO"),
        ("glint.requests", "ERROR"),
        ("glint.requests", "ERROR"),
    ]
    assert caplog.messages[0] == str(FULL)


def test_a_traceback_is_a_field_of_the_json_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as problem:
        details = (type(problem), problem, problem.__traceback__)
    record = logging.LogRecord("glint.server", logging.ERROR, "", 0, "it failed: %s", ("a\nb",), details)
    text = JsonFormatter().format(record)
    line = json.loads(text)
    assert "\n" not in text and (line["level"], line["message"]) == ("error", "it failed: a\nb")
    assert line["traceback"].startswith("Traceback (most recent call last):\n") and "two\nlines" in line["traceback"]


def test_a_cancelled_task_is_no_news() -> None:
    for problem, is_shown in ((asyncio.CancelledError(), False), (ValueError(), True)):
        details = (type(problem), problem, None)
        record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Exception in ASGI application", (), details)
        assert is_no_cancellation(record) == is_shown
    assert is_no_cancellation(logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "gone", (), None))


def test_a_ticket_is_closed_once() -> None:
    log: list[RequestOutcome] = []
    metrics: list[RequestOutcome] = []
    record = RequestRecord("chatcmpl-1", "/v1/chat/completions", log.append, metrics.append)
    assert record.is_open and record.seconds >= 0
    assert record.close(FULL)
    assert not record.is_open
    assert not record.close(dataclasses.replace(FULL, outcome="failed"))
    del record
    gc.collect()
    assert log == metrics == [FULL]


def test_threads_that_race_to_close_write_one_line() -> None:
    for _ in range(50):
        outcomes: list[RequestOutcome] = []
        record = RequestRecord("a", "/", outcomes.append)
        barrier = threading.Barrier(4)

        def close(record: RequestRecord = record, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            record.close(FULL)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == [FULL]


def test_a_ticket_that_is_dropped_is_a_lost_request() -> None:
    outcomes: list[RequestOutcome] = []
    record = RequestRecord("cmpl-9", "/v1/completions", outcomes.append)
    del record
    gc.collect()
    [lost] = outcomes
    assert (lost.request_id, lost.route, lost.outcome, lost.reason) == ("cmpl-9", "/v1/completions", "failed", "lost")
    assert lost.total_seconds is not None and lost.total_seconds >= 0


def test_a_ticket_that_is_open_at_the_end_of_the_process_is_a_lost_request() -> None:
    program = (
        "import logging, sys\n"
        "from glint.server.outcomes import OutcomeLog, RequestRecord\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "record = RequestRecord('cmpl-9', '/x', OutcomeLog().write)\n"
        "sys.exit(0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    [line] = ran.stdout.splitlines()
    assert line.startswith("request_id=cmpl-9 route=/x outcome=failed reason=lost ")
    assert ran.stderr == ""
