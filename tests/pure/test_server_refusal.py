"""A full queue refuses a call before its body is read: the response, the log line and the metrics of each such call."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Scope

from glint.server.app import GENERATING, make_app
from glint.server.auth import ANYONE, ApiKeys
from glint.server.http.problems import ANTHROPIC_PATHS
from glint.server.outcomes import RequestOutcome
from glint.server.process.lifecycle import Startup
from glint.server.process.link import RECORD_BYTES, InheritedState, SupervisedOutcomeLog, SupervisorLink
from glint.server.serve import Server
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


def linked() -> tuple[socket.socket, SupervisorLink]:
    """The supervisor's end of a link, and a server's."""
    supervisor, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor.setblocking(False)
    with socket.socket() as listener:
        inherited = InheritedState(os.dup(listener.fileno()), theirs.detach(), os.getppid(), 0.0)
    return supervisor, SupervisorLink(inherited)


def received_ids(supervisor: socket.socket) -> list[str]:
    """The requests whose outcomes have arrived."""
    found = []
    while True:
        try:
            kind, outcomes = json.loads(supervisor.recv(RECORD_BYTES))
        except BlockingIOError:
            return found
        assert kind == "refused_requests"
        found += [fields["request_id"] for fields in outcomes]


class Ended(BaseException):
    """The process would have ended."""


def test_the_watchdog_sends_the_refusals_of_an_event_loop_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn of the event loop in which requests were refused never ends; another thread ends the process."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    supervisor, link = linked()
    server = Server(ServerSettings(tmp_path, (MODEL,), ApiKeys(())), Startup(), link=link)
    log = SupervisedOutcomeLog(link)
    exits: list[object] = []

    def watch() -> None:
        try:
            server._exit_now("the event loop hangs")
        except Ended as ended:
            exits.extend(ended.args)

    async def refuse_and_hang() -> list[str]:
        for index in range(3):
            log.write_soon(RequestOutcome(f"cmpl-{index}", "/v1/completions", "refused", "queue_full", 429))
        watchdog = threading.Thread(target=watch)
        watchdog.start()
        watchdog.join()
        return received_ids(supervisor)

    with supervisor:
        assert asyncio.run(refuse_and_hang()) == ["cmpl-0", "cmpl-1", "cmpl-2"]
        assert exits == [1] and received_ids(supervisor) == []
        link.listener.close()


def test_records_that_wait_for_the_supervisor_are_sent_before_the_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("glint.server.process.link.FINISH_SECONDS", 60.0)
    supervisor, link = linked()
    log = SupervisedOutcomeLog(link)
    outcomes = [RequestOutcome(f"cmpl-{index}", "/" + "x" * 190, "refused", "queue_full", 429) for index in range(3000)]
    found: list[str] = []

    async def refuse_all() -> None:
        for outcome in outcomes:
            log.write_soon(outcome)

    def read_late() -> None:
        while len(found) < len(outcomes):
            time.sleep(0.01)
            found.extend(received_ids(supervisor))

    with supervisor:
        asyncio.run(refuse_all())
        link.flush()
        reader = threading.Thread(target=read_late, daemon=True)
        assert link._waiting, "the kernel had room for all"
        reader.start()
        link.finish()
        reader.join(60.0)
        assert found == [outcome.request_id for outcome in outcomes]
        link.listener.close()


def test_a_supervisor_that_does_not_read_cannot_hold_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glint.server.process.link.FINISH_SECONDS", 0.2)
    supervisor, link = linked()
    with supervisor:
        for index in range(3000):
            link.send("end", {"request_id": f"cmpl-{index}", "route": "x" * 200})
        began = time.monotonic()
        link.finish()
        assert link._waiting and 0.1 < time.monotonic() - began < 30.0
        link.listener.close()
