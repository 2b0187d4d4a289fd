"""The process of `glint serve`: it holds the listening socket and keeps a server running.

The server, HTTP and engine, is a child process with the same command line. While no child is ready, the supervisor
answers requests itself. It never loads a model, so a failure of the engine cannot break it.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping

from glint.errors import EngineError, RequestError
from glint.server.http.listener import listening
from glint.server.http.tls import tls_files
from glint.server.outcomes import OutcomeLog, RequestOutcome
from glint.server.process.lifecycle import Lifecycle, ReadinessGate, boot_seconds, process_began
from glint.server.process.link import RECORD_BYTES, SIGNALS, VARIABLE, InheritedState
from glint.server.process.not_ready import NotReadyServer
from glint.server.web import WebFile, WebFiles, read_files

log = logging.getLogger("glint.server")
EXIT_FAILED = 1
EXIT_USAGE = 2
TICK_SECONDS = 0.5
HEALTHY_SECONDS = 600.0
LONGEST_PAUSE_SECONDS = 30.0
RESTARTS_AT_ONCE = 2
KILL_SECONDS = 10.0
UNKILLABLE_SECONDS = 60.0


def supervise(chosen: argparse.Namespace) -> int:
    """Keep a server running until a signal or until it has failed too often; returns the exit code."""
    if chosen.max_restarts < 0:
        raise RequestError(f"--max-restarts is {chosen.max_restarts}; give 0 or more, or --no-restart")
    pages = read_files() if chosen.serves_web else {}
    files = tls_files(chosen.ssl_certfile, chosen.ssl_keyfile)
    tls = None if files is None else files.make_context()
    with listening(chosen.host, chosen.port, chosen.uds, chosen.uds_mode) as listener:
        return asyncio.run(Supervisor(listener, chosen.max_restarts, chosen.health_timeout, pages, tls).run())


class Child:
    """One server process: what it has reported, and its open requests.

    `silent_seconds` is the time without a heartbeat once the server is ready. The supervisor kills it at `kill_at`.
    """

    def __init__(self, began: float, restarts: int, lost: int, listener: socket.socket, model: str | None) -> None:
        self.open_requests: dict[str, tuple[str, float]] = {}
        self.is_ready = False
        self.is_refused = False
        self.ready_at: float | None = None
        self.failure: str | None = None
        self.silent_seconds = 0.0
        self.kill_at: float | None = None
        self.killed_at: float | None = None
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.link.setblocking(False)
            files = (listener.fileno(), theirs.fileno())
            inherited = InheritedState(*files, os.getpid(), began, restarts, lost, model)
            command = [sys.executable, *sys.orig_argv[1:]]
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                environment = os.environ | {VARIABLE: inherited.as_text()}
                self.process = subprocess.Popen(command, pass_fds=files, env=environment)
            except OSError as problem:
                raise EngineError(f"the server process cannot be started: {command[0]}: {problem}") from problem
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def ready_seconds(self) -> float:
        """Seconds since the server became ready; 0 if it never did."""
        return 0.0 if self.ready_at is None else time.monotonic() - self.ready_at

    def send(self, kind: str, *values: object) -> None:
        """Send a record. A server that no longer reads also sends no heartbeat, and is killed for that."""
        try:
            self.link.send(json.dumps([kind, *values]).encode())
        except OSError:
            log.warning("the server process %d does not take the record '%s'", self.process.pid, kind)

    def kill_within(self, seconds: float) -> None:
        """Kill the process unless it ends within so many seconds."""
        self.kill_at = time.monotonic() + seconds

    def kill(self) -> None:
        """Kill the process now."""
        self.killed_at = time.monotonic()
        self.process.kill()


class Supervisor:
    """Starts one server after the other on the same socket, and answers while none is ready."""

    def __init__(
        self,
        listener: socket.socket,
        max_restarts: int,
        health_seconds: float,
        pages: Mapping[str, WebFile],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._max_restarts = max_restarts
        self._health_seconds = health_seconds
        self._lifecycle = Lifecycle(health_seconds)
        self._not_ready = NotReadyServer(listener, WebFiles(ReadinessGate(self._lifecycle), pages), tls)
        self._outcomes = OutcomeLog()
        self._child: Child | None = None
        self._model: str | None = None
        self._num_in_a_row = 0
        self._num_lost = 0
        self._failed_at: float | None = None
        self._started_at = time.monotonic()
        self._start_seconds = 0.0
        self._num_signals = 0
        self._has_served = False
        self._stopped = asyncio.Event()

    async def run(self) -> int:
        """Run servers until the end; returns the exit code."""
        loop = asyncio.get_running_loop()
        for sig in SIGNALS:
            loop.add_signal_handler(sig, self._stop, sig)
        self._not_ready.open()
        began = process_began()
        while True:
            self._started_at = time.monotonic()
            restarts, lost = self._lifecycle.restarts, self._num_lost
            child = self._child = Child(began, restarts, lost, self._listener, self._model)
            code = await self._follow(child)
            if self._stopped.is_set():
                return self._end(child, code)
            if not self._has_served and (child.is_refused or code == EXIT_USAGE):
                return code
            pause = self._next_pause(child, code)
            if pause is None:
                return EXIT_FAILED
            if await self._is_stopped_within(pause):
                return 0
            began = boot_seconds()

    async def _follow(self, child: Child) -> int:
        """Read the records of a server until it has ended; returns its exit code, negative for a signal."""
        loop = asyncio.get_running_loop()
        loop.add_reader(child.link, self._read, child)
        watching = asyncio.create_task(self._watch(child))
        code = await asyncio.to_thread(child.process.wait)
        watching.cancel()
        self._read(child)
        loop.remove_reader(child.link)
        child.link.close()
        self._child = None
        for request_id, (route, began_at) in child.open_requests.items():
            seconds = time.monotonic() - began_at
            reason = f"exit_code_{code}" if code >= 0 else signal.Signals(-code).name
            self._outcomes.write(RequestOutcome(request_id, route, "lost", reason, total_seconds=seconds))
        self._num_lost += len(child.open_requests)
        return code

    def _read(self, child: Child) -> None:
        """Handle all records that have arrived."""
        while True:
            try:
                record = child.link.recv(RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError:
                record = b""
            if not record:
                asyncio.get_running_loop().remove_reader(child.link)
                return
            self._handle(child, *json.loads(record))

    def _handle(self, child: Child, kind: str, *values: object) -> None:
        child.silent_seconds = 0.0
        match kind, *values:
            case "begin", str(request_id), str(route):
                child.open_requests[request_id] = (route, time.monotonic())
            case "end", dict(fields):
                child.open_requests.pop(fields["request_id"], None)
                self._outcomes.write(RequestOutcome(**fields))
            case "refused_requests", list(outcomes):
                for fields in outcomes:
                    self._outcomes.write(RequestOutcome(**fields))
            case "phase", "warming" if self._lifecycle.phase == "loading":
                self._lifecycle.phase = "warming"
            case "model", str(model):
                self._model = model
            case ("refused",):
                child.is_refused = True
            case "failed", str(failure):
                child.failure = failure
                child.kill_within(KILL_SECONDS)
                self._answer_for(failure)
            case ("ready",):
                self._hand_over(child)

    def _hand_over(self, child: Child) -> None:
        """The server is ready: it accepts connections, and the supervisor stops."""
        self._not_ready.close()
        self._lifecycle.phase, self._lifecycle.failure = "ready", None
        self._has_served = child.is_ready = True
        child.ready_at = time.monotonic()
        self._start_seconds = child.ready_at - self._started_at
        child.send("accept")
        if self._failed_at is not None:
            seconds = time.monotonic() - self._failed_at
            log.info("ready again %.1f s after the failure, restart %d", seconds, self._lifecycle.restarts)
            self._failed_at = None

    def _answer_for(self, failure: str) -> None:
        """Answer requests in the supervisor, since no server is ready for this reason."""
        if self._stopped.is_set():
            return
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        self._lifecycle.phase, self._lifecycle.failure = "restarting", failure
        self._not_ready.open()

    async def _watch(self, child: Child) -> None:
        """Kill a server that sends no heartbeat, or that does not end in time.

        Silence is counted in turns of this loop, so that a supervisor that was paused together with its server does not
        kill it.
        """
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if child.is_ready:
                child.silent_seconds += TICK_SECONDS
            now = time.monotonic()
            if child.killed_at is not None:
                if now > child.killed_at + UNKILLABLE_SECONDS:
                    log.error("the server process %d was killed and does not end: the process ends", child.process.pid)
                    logging.shutdown()
                    os._exit(EXIT_FAILED)
            elif child.silent_seconds > self._health_seconds and child.failure is None:
                child.failure = f"no heartbeat for {child.silent_seconds:g} s, longer than --health-timeout allows"
                child.kill()
            elif child.kill_at is not None and now > child.kill_at:
                child.kill()

    def _next_pause(self, child: Child, code: int) -> float | None:
        """Seconds until the next start, or None after too many restarts. It logs which."""
        end = _describe_end(code)
        failure = end if child.failure is None else f"{child.failure}; {end}"
        self._answer_for(failure)
        if child.ready_seconds >= HEALTHY_SECONDS:
            self._num_in_a_row = 0
        if self._num_in_a_row >= self._max_restarts:
            log.error(
                "%s; it was restarted %d times without %g minutes of service in between, as many as "
                "--max-restarts allows: the process ends",
                failure,
                self._num_in_a_row,
                HEALTHY_SECONDS / 60,
            )
            return None
        num_paused = self._num_in_a_row - RESTARTS_AT_ONCE
        pause = 0.0 if num_paused < 0 else min(2.0**num_paused, LONGEST_PAUSE_SECONDS)
        self._num_in_a_row += 1
        self._lifecycle.restarts += 1
        self._lifecycle.ready_at = time.monotonic() + pause + self._start_seconds
        when = f"in {pause:g} s" if pause else "now"
        log.error(
            "%s; requests lost: %d; it starts again %s, restart %d of at most %d in a row",
            failure,
            len(child.open_requests),
            when,
            self._num_in_a_row,
            self._max_restarts,
        )
        return pause

    def _stop(self, sig: int) -> None:
        """Forward the first signal for a drain and the second to stop at once; kill a server that is not ready yet."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._stopped.set()
            self._not_ready.close()
            self._listener.close()
        child = self._child
        if child is None or not child.is_ready:
            log.info("signal %d: nothing is served yet, the process ends", sig)
            if child is not None:
                child.kill()
            return
        child.send("signal", sig)
        if self._num_signals > 1:
            child.kill_within(KILL_SECONDS)

    def _end(self, child: Child, code: int) -> int:
        """The exit code after a signal: that of the server, which is 0 unless it failed while it drained."""
        if not child.is_ready:
            return 0
        if code < 0:
            log.error("%s while it drained", _describe_end(code))
        return code if code >= 0 else EXIT_FAILED

    async def _is_stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True


def _describe_end(code: int) -> str:
    """How a process ended, in words."""
    end = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return f"the server process {end}"
