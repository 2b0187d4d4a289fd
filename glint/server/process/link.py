"""A server process under a supervisor: the socket that it inherits, and the link over which the two talk.

Every record is one message of a Unix socket: a JSON list of a word and its values. The server tells its phases, its
requests as they begin and end, and a heartbeat; it is told when to accept connections and which signals came.
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import msgspec

from glint.server.outcomes import OutcomeLog, RequestOutcome

VARIABLE = "GLINT_SUPERVISOR"
RECORD_BYTES = 64 * 1024
BEAT_SECONDS = 0.25
EXIT_ORPHAN = 1
SET_DEATH_SIGNAL = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class InheritedState:
    """What a supervisor hands to a server: two open files, its own process, the moment that the start began, and how
    many restarts and lost requests there were before."""

    listener: int
    link: int
    supervisor: int
    began: float
    restarts: int = 0
    lost: int = 0

    def as_text(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))


def inherited_link() -> "SupervisorLink | None":
    """The link to the supervisor that started this process; None where nobody did.

    From here on this process dies with its supervisor, and signals that a terminal or systemd sends to both of them
    are left to the supervisor.
    """
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    for sig in SIGNALS:
        signal.signal(sig, _leave_to_the_supervisor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    given = InheritedState(**json.loads(text))
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != given.supervisor:
        os._exit(EXIT_ORPHAN)
    return SupervisorLink(given)


def _leave_to_the_supervisor(sig: int, frame: FrameType | None) -> None:
    """Do nothing; unlike an ignored signal this is not inherited by processes that are started."""


class SupervisorLink:
    """The server's end of the link. Records that the kernel has no room for wait here, in their order."""

    def __init__(self, given: InheritedState) -> None:
        self.given = given
        self.listener = socket.socket(fileno=given.listener)
        self._socket = socket.socket(fileno=given.link)
        self._socket.setblocking(False)
        for inherited in (self.listener, self._socket):
            inherited.set_inheritable(False)
        self._waiting: deque[bytes] = deque()
        self._lock = threading.RLock()
        self._may_accept = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    def tell(self, word: str, *values: Any) -> None:
        """Send a record, from any thread; it is with the kernel when this returns, unless the supervisor is behind."""
        with self._lock:
            self._waiting.append(msgspec.json.encode([word, *values]))
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
        """Begin to listen to the supervisor and to send heartbeats, on the running event loop."""
        self._beating = asyncio.create_task(self._beat())
        asyncio.get_running_loop().add_reader(self._socket, self._read, on_signal)

    async def take_over(self) -> None:
        """Say that the server is ready; returns when the supervisor accepts no more connections itself."""
        self.tell("ready")
        await self._may_accept.wait()

    async def _beat(self) -> None:
        while True:
            self.tell("beat")
            await asyncio.sleep(BEAT_SECONDS)

    def _read(self, on_signal: Callable[[int, FrameType | None], None]) -> None:
        with suppress(BlockingIOError):
            record = self._socket.recv(RECORD_BYTES)
            if not record:
                os._exit(EXIT_ORPHAN)
            word, *values = json.loads(record)
            if word == "accept":
                self._may_accept.set()
            elif word == "signal":
                on_signal(values[0], None)


class SupervisedOutcomeLog(OutcomeLog):
    """Outcomes that the supervisor writes: one record is one line, also where this process dies in between."""

    def __init__(self, link: SupervisorLink) -> None:
        super().__init__()
        self._link = link

    def admit(self, request_id: str, route: str) -> None:
        """Let the supervisor know of the request."""
        self._link.tell("begin", request_id, route)

    def write(self, outcome: RequestOutcome) -> None:
        """Hand the outcome to the supervisor."""
        self._link.tell("end", outcome.as_dict())
