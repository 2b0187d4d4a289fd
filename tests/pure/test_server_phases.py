"""The phases of a server, what it tells those who watch it, and how a start is timed."""

from __future__ import annotations

import asyncio
import time
from typing import Any, get_args

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from glint.server.process.lifecycle import Lifecycle, Phase, ReadinessGate, Startup


def get(lifecycle: Lifecycle, path: str) -> httpx.Response:
    """One request through the readiness gate."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(ReadinessGate(lifecycle))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(run())


def at(phase: Phase, stalled: float = 0.0) -> Lifecycle:
    """A server in a phase, with an application that always answers."""
    lifecycle = Lifecycle(health_seconds=10.0)
    lifecycle.phase = phase
    lifecycle.app = PlainTextResponse("inside")
    lifecycle.stalled_seconds = lambda: stalled
    return lifecycle


@pytest.mark.parametrize("phase", get_args(Phase))
def test_who_is_let_in_when(phase: Phase) -> None:
    lifecycle = at(phase)
    assert get(lifecycle, "/health").status_code == (503 if phase == "failed" else 200)
    assert get(lifecycle, "/ready").status_code == (200 if phase == "ready" else 503)
    answer = get(lifecycle, "/v1/models")
    if phase in ("ready", "draining"):
        assert answer.text == "inside"
    else:
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert phase in answer.json()["error"]["message"]


def test_a_failed_server_says_why() -> None:
    lifecycle = at("ready")
    assert "reason" not in get(lifecycle, "/health").json()
    lifecycle.fail("the engine failed: rank 2 of 4 failed")
    for path in ("/health", "/ready"):
        answer = get(lifecycle, path)
        assert answer.status_code == 503
        assert (answer.json()["phase"], answer.json()["reason"]) == ("failed", "the engine failed: rank 2 of 4 failed")
    refused = get(lifecycle, "/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
    assert "rank 2 of 4 failed" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("seconds", "header"), [(None, "1"), (-5.0, "1"), (0.2, "1"), (29.5, "30"), (900.0, "60")])
def test_clients_are_told_when_to_try_again(seconds: float | None, header: str) -> None:
    lifecycle = at("restarting")
    lifecycle.failure = "the server process was killed by SIGKILL"
    lifecycle.ready_at = None if seconds is None else time.monotonic() + seconds
    answer = get(lifecycle, "/v1/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, header)
    assert "killed by SIGKILL; the server is restarting" in answer.json()["error"]["message"]


def test_nobody_is_let_in_before_there_is_an_application() -> None:
    lifecycle = at("ready")
    lifecycle.app = None
    assert get(lifecycle, "/stats").status_code == 503


@pytest.mark.parametrize(("stalled", "status"), [(0.0, 200), (10.0, 200), (10.1, 503)])
def test_health_is_the_time_since_a_step(stalled: float, status: int) -> None:
    lifecycle = at("ready", stalled)
    answer = get(lifecycle, "/health")
    assert answer.status_code == get(lifecycle, "/ready").status_code == status
    assert answer.json()["seconds_since_last_step"] == stalled
    assert answer.json()["status"] == ("ok" if status == 200 else "unhealthy")


def test_a_websocket_is_closed() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope: dict[str, Any] = {"type": "websocket", "path": "/health"}
    asyncio.run(ReadinessGate(at("loading"))(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_phases_add_up_to_the_whole() -> None:
    began = time.monotonic()
    startup = Startup()
    startup.mark("before")
    time.sleep(0.02)
    startup.mark("sleep")
    time.sleep(0.01)
    startup.mark("sleep")
    assert list(startup.seconds) == ["before", "sleep"] and startup.seconds["sleep"] >= 0.03
    assert sum(startup.seconds.values()) == pytest.approx(startup.total_seconds)
    own_age = startup.seconds["before"]
    assert own_age > 0 and startup.total_seconds >= time.monotonic() - began
    lines = startup.table().splitlines()
    assert [line.split()[0] for line in lines] == ["before", "sleep", "all"]
    assert lines[-1].endswith(f"{startup.total_seconds:.2f} s")
