"""A full queue refuses a call before its body is read: the response, the log line and the metrics of each such call."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Scope

from glint.server.app import GENERATING, make_app
from glint.server.auth import ANYONE, ApiKeys
from glint.server.http.problems import ANTHROPIC_PATHS
from glint.server.outcomes import RequestOutcome
from glint.server.process.link import RECORD_BYTES, InheritedState, SupervisedOutcomeLog, SupervisorLink
from glint.server.settings import ServerSettings
from glint.server.state import ServerState
from tests.pure.scripted_model import MODEL, make_state


@pytest.fixture
def full(tmp_path: Path) -> ServerState:
    """The state of a server whose queue is full."""
    with ThreadPoolExecutor(1) as workers:
        state = make_state(tmp_path, 0, workers)
        state.admission.admit([1] * state.limits.waiting_requests, ANYONE.share())
        return state


def call_unread(app: ASGIApp, path: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the response to a call whose body nobody may read."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "headers": [(b"host", b"127.0.0.1")],
    }
    asyncio.run(app(scope, receive, send))
    begin, body = sent
    headers = {name.decode(): value.decode() for name, value in begin["headers"]}
    return begin["status"], headers, json.loads(body["body"])


def test_every_refusal_is_whole_and_recorded_once(
    full: ServerState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(full, ServerSettings(tmp_path, (MODEL,), ApiKeys(())))
    ids = []
    with caplog.at_level(logging.INFO, "glint.requests"):
        for path in [path for path, *_ in GENERATING] * 2:
            status, headers, body = call_unread(app, path)
            assert (status, headers["retry-after"], headers["content-type"]) == (429, "1", "application/json")
            assert body["error"]["type"] == "rate_limit_error" and "try again in 1 s" in body["error"]["message"]
            ids.append(headers["request-id" if path in ANTHROPIC_PATHS else "x-request-id"])
            if path in ANTHROPIC_PATHS:
                assert body["request_id"] == ids[-1]
            else:
                assert body["error"]["code"] == "queue_full"
    outcomes = [record.msg for record in caplog.records if isinstance(record.msg, RequestOutcome)]
    assert [(one.request_id, one.outcome, one.reason, one.status) for one in outcomes] == [
        (request_id, "refused", "queue_full", 429) for request_id in ids
    ]
    assert [one.route for one in outcomes] == [path for path, *_ in GENERATING] * 2
    assert len(set(ids)) == len(ids) and all(one.total_seconds is not None for one in outcomes)
    stats = full.metrics.as_dict()
    assert stats["requests_refused_by_full_queue"] == stats["requests_by_outcome"]["refused"] == len(ids)


def test_refusals_of_one_turn_reach_the_supervisor_in_few_records() -> None:
    supervisor, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with supervisor, socket.socket() as listener:
        supervisor.setblocking(False)
        link = SupervisorLink(InheritedState(os.dup(listener.fileno()), theirs.detach(), os.getppid(), 0.0))
        log = SupervisedOutcomeLog(link)
        refused = [
            RequestOutcome(f"cmpl-{index}", "/" + "x" * 300, "refused", "queue_full", 429) for index in range(150)
        ]

        async def refuse_all() -> None:
            for outcome in refused:
                log.write_soon(outcome)
            with pytest.raises(BlockingIOError):
                supervisor.recv(RECORD_BYTES)
            await asyncio.sleep(0)

        asyncio.run(refuse_all())
        records = [json.loads(supervisor.recv(RECORD_BYTES)) for _ in range(3)]
        with pytest.raises(BlockingIOError):
            supervisor.recv(RECORD_BYTES)
        link.listener.close()
    assert [kind for kind, _ in records] == ["refused_requests"] * 3
    received = [RequestOutcome(**fields) for _, outcomes in records for fields in outcomes]
    assert [one.request_id for one in received] == [one.request_id for one in refused]
    assert {(one.outcome, one.reason, one.status, one.total_seconds) for one in received} == {
        ("refused", "queue_full", 429, None)
    }
