"""The server's end of the link to its supervisor, and what the server inherits from it.

Every record is one message of a Unix socket: a JSON list of its kind and its values. The server sends its phases, the
begin and the end of its requests, and a heartbeat. Requests that it refused unread have no begin, and one record has
the ends of several. The supervisor sends when to accept connections, and signals.
"""

import asyncio
import ctypes
import json
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import msgspec

from glint.server.outcomes import OutcomeLog, OutcomeValue, RequestOutcome

VARIABLE = "GLINT_SUPERVISOR"
RECORD_BYTES = 64 * 1024
REFUSED_PER_RECORD = 64
HEARTBEAT_SECONDS = 0.25
FINISH_SECONDS = 1.0
EXIT_ORPHAN = 1
SET_DEATH_SIGNAL = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class InheritedState:
    """What a server inherits: two open files, the process id of its supervisor, the time at which the start began, the
    numbers of earlier restarts and lost requests, and the model id, with its commit, that the first server resolved."""

    listener: int
    link: int
    supervisor: int
    began: float
    restarts: int = 0
    lost: int = 0
    model: str | None = None

    def as_text(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))


def inherited_link() -> "SupervisorLink | None":
    """The link to the supervisor of this process; None where it has none.

    From here on the kernel kills this process when its supervisor dies. The process ignores the signals that a terminal
    or systemd sends to both: the supervisor handles them.
    """
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    for sig in SIGNALS:
        signal.signal(sig, _leave_to_the_supervisor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    inherited = InheritedState(**json.loads(text))
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != inherited.supervisor:
        os._exit(EXIT_ORPHAN)
    return SupervisorLink(inherited)


def _leave_to_the_supervisor(sig: int, frame: FrameType | None) -> None:
    """Do nothing. Child processes do not inherit this, unlike an ignored signal."""


class SupervisorLink:
    """The server's end of the link. Records wait here, in order, while the kernel has no room for them."""

    def __init__(self, inherited: InheritedState) -> None:
        self.inherited = inherited
        self.listener = socket.socket(fileno=inherited.listener)
        self._socket = socket.socket(fileno=inherited.link)
        self._socket.setblocking(False)
        for opened in (self.listener, self._socket):
            opened.set_inheritable(False)
        self._waiting: deque[bytes] = deque()
        self._refused: list[dict[str, OutcomeValue]] = []
        self._lock = threading.RLock()
        self._may_accept = asyncio.Event()
        self._heartbeats: asyncio.Task[None] | None = None

    def send(self, kind: str, *values: Any) -> None:
        """Send a record, from any thread. On return the kernel has it, unless the supervisor is behind."""
        with self._lock:
            self._waiting.append(msgspec.json.encode([kind, *values]))
            self._send_waiting()

    def send_refused(self, fields: dict[str, OutcomeValue]) -> None:
        """Send the outcome of a refused request with others of this turn of the event loop, on whose thread it runs."""
        with self._lock:
            if not self._refused:
                asyncio.get_running_loop().call_soon(self.flush)
            self._refused.append(fields)

    def flush(self) -> None:
        """Send the outcomes of refused requests that have not been sent, from any thread."""
        with self._lock:
            refused, self._refused = self._refused, []
            for begin in range(0, len(refused), REFUSED_PER_RECORD):
                self.send("refused_requests", refused[begin : begin + REFUSED_PER_RECORD])

    def finish(self) -> None:
        """Send all that waits before the process ends, from any thread; a supervisor that is behind has a second."""
        self.flush()
        deadline = time.monotonic() + FINISH_SECONDS
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        with self._lock:
            while self._waiting and (left := deadline - time.monotonic()) > 0:
                room.poll(1000 * left)
                self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            record = self._waiting.popleft()
            try:
                self._socket.send(record)
            except BlockingIOError:
                self._waiting.appendleft(record)
                return
            except OSError:
                os._exit(EXIT_ORPHAN)

    def open(self, on_signal: Callable[[int, FrameType | None], None]) -> None:
        """Begin to read records and to send heartbeats, on the running event loop."""
        self._heartbeats = asyncio.create_task(self._send_heartbeats())
        asyncio.get_running_loop().add_reader(self._socket, self._read, on_signal)

    async def take_over(self) -> None:
        """Report that the server is ready; returns once the supervisor accepts no more connections itself."""
        self.send("ready")
        await self._may_accept.wait()

    async def _send_heartbeats(self) -> None:
        while True:
            self.send("beat")
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _read(self, on_signal: Callable[[int, FrameType | None], None]) -> None:
        with suppress(BlockingIOError):
            record = self._socket.recv(RECORD_BYTES)
            if not record:
                os._exit(EXIT_ORPHAN)
            kind, *values = json.loads(record)
            if kind == "accept":
                self._may_accept.set()
            elif kind == "signal":
                on_signal(values[0], None)


class SupervisedOutcomeLog(OutcomeLog):
    """Sends outcomes to the supervisor, which writes one line for each, even if this process dies meanwhile."""

    def __init__(self, link: SupervisorLink) -> None:
        super().__init__()
        self._link = link

    def admit(self, request_id: str, route: str) -> None:
        """Report the request to the supervisor."""
        self._link.send("begin", request_id, route)

    def write(self, outcome: RequestOutcome) -> None:
        """Send the outcome to the supervisor."""
        self._link.send("end", outcome.known())

    def write_soon(self, outcome: RequestOutcome) -> None:
        """Send the outcome to the supervisor at the end of this turn of the event loop."""
        self._link.send_refused(outcome.known())
