"""The phases of a server, from loading to draining or failed, and the routes /health and /ready."""

import os
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from glint.server.http.problems import Problem, send_problem

Phase = Literal["loading", "warming", "ready", "draining", "failed", "restarting"]

MAX_RETRY_SECONDS = 60


class Startup:
    """Times the phases of a start. A phase lasts from the mark before to its own, so the phases add up to the whole.

    The first phase begins at `began`, a time of `boot_seconds`, or with the process: then it includes the interpreter
    and the imports.
    """

    def __init__(self, began: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._marked_at = time.monotonic() - (boot_seconds() - (process_began() if began is None else began))
        self._started_at = self._marked_at

    @property
    def total_seconds(self) -> float:
        """The time from the start of the process to the last mark."""
        return self._marked_at - self._started_at

    def mark(self, phase: str) -> None:
        """Close a phase."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._marked_at
        self._marked_at = now

    def table(self) -> str:
        """The phases and their sum as lines of text."""
        rows = [*self.seconds.items(), ("all", self.total_seconds)]
        return "\n".join(f"  {phase:<34} {seconds:7.2f} s" for phase, seconds in rows)


def boot_seconds() -> float:
    """Seconds since the machine started: a clock that all processes share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_began() -> float:
    """When this process began, as `boot_seconds` counts."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return min(boot_seconds(), started_ticks / os.sysconf("SC_CLK_TCK"))


class Lifecycle:
    """The phase of a server. It has an `app` once the model is loaded and a `failure` once it failed.

    `restarts` counts the restarts of the engine after failures. `ready_at` is the expected time of readiness, as
    `time.monotonic` counts, where it is known.
    """

    def __init__(self, health_seconds: float) -> None:
        self.phase: Phase = "loading"
        self.app: ASGIApp | None = None
        self.failure: str | None = None
        self.restarts = 0
        self.ready_at: float | None = None
        self.stalled_seconds: Callable[[], float] = lambda: 0.0
        self._health_seconds = health_seconds

    def fail(self, failure: str) -> None:
        """End service, for this reason."""
        self.phase = "failed"
        self.failure = failure

    @property
    def is_healthy(self) -> bool:
        """Whether steps complete while there is work. A server that loads or restarts is healthy."""
        return self.phase != "failed" and self.stalled_seconds() <= self._health_seconds

    @property
    def retry_seconds(self) -> int:
        """Seconds after which a client should try again, 1 to 60: clients heed up to a minute."""
        seconds = 0.0 if self.ready_at is None else self.ready_at - time.monotonic()
        return min(max(ceil(seconds), 1), MAX_RETRY_SECONDS)

    def as_dict(self) -> dict[str, Any]:
        """The body of /health and /ready."""
        reason = {} if self.failure is None else {"reason": self.failure}
        return {
            "status": "ok" if self.is_healthy else "unhealthy",
            "phase": self.phase,
            "seconds_since_last_step": round(self.stalled_seconds(), 3),
            "restarts": self.restarts,
        } | reason


class ReadinessGate:
    """The outermost ASGI application: answers /health and /ready, and passes the rest on once the server is ready."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        lifecycle = self._lifecycle
        if scope["type"] == "http" and scope["path"] in ("/health", "/ready"):
            await self._report(scope["path"], send)
        elif lifecycle.phase in ("ready", "draining") and lifecycle.app is not None:
            await lifecycle.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            has_failed = lifecycle.failure is not None
            reason = f"{lifecycle.failure}; " if has_failed else ""
            message = f"{reason}the server is {lifecycle.phase}; try again in a moment"
            code = "engine_failed" if has_failed else "not_ready"
            headers = {"Retry-After": str(lifecycle.retry_seconds)}
            problem = Problem(503, message, code=code, headers=headers)
            await send_problem(send, scope["path"], problem)

    async def _report(self, path: str, send: Send) -> None:
        lifecycle = self._lifecycle
        is_good = lifecycle.is_healthy and (path == "/health" or lifecycle.phase == "ready")
        body = msgspec.json.encode(lifecycle.as_dict())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200 if is_good else 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
