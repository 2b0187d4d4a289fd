"""What a client may ask for at most, and the bounded queue. Everything is checked before any text is tokenised."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from glint.server.bounds import Limits
from glint.server.problems import Problem

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
NUM_REMEMBERED_DEPARTURES = 64


def check_count(field: str, count: int, limit: int, what: str = "entries") -> None:
    """Refuse a field that has or asks for more of something than the limit."""
    if count > limit:
        message = f"the field '{field}' has {count} {what}; at most {limit} are allowed"
        raise Problem(400, message, "limit_exceeded", field)


def check_schema(field: str, schema: Any, limits: Limits) -> None:
    """Refuse a decoded JSON schema that is too deep or too long, without recursion."""
    level: list[Any] = [schema]
    depth = 0
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        if depth > limits.schema_depth:
            message = f"the field '{field}' nests deeper than the {limits.schema_depth} levels that are allowed"
            raise Problem(400, message, "limit_exceeded", field)
        level = [child for part in level for child in (part.values() if isinstance(part, dict) else part)]
    num_bytes = len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode())
    check_count(field, num_bytes, limits.schema_bytes, "bytes as JSON")


def deadline_of(seconds: float | None, limits: Limits, field: str = "deadline_seconds") -> float:
    """The seconds that a request may take: those it asked for, or the default."""
    if seconds is None:
        return limits.deadline_seconds
    if not 0 < seconds <= limits.max_deadline_seconds:
        allowed = f"above 0 and at most {limits.max_deadline_seconds:.15g} (--max-request-timeout)"
        message = f"the field '{field}' is {seconds}; it must be {allowed}"
        raise Problem(400, message, "invalid_value", field)
    return seconds


class Admission:
    """The bookkeeping of the bounded queue, in requests and in prompt tokens. For one thread.

    It counts the requests that wait for their first step, and while they are prepared those that are yet to wait; a
    request that has started no longer counts, even when it is preempted later. What is refused changes nothing.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._departures: deque[tuple[float, int]] = deque(maxlen=NUM_REMEMBERED_DEPARTURES)
        self.num_preparing = 0
        self.num_waiting = 0
        self.num_running = 0
        self.waiting_tokens = 0

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request while its prompt is read; refuses it before any work while there is no room for one more."""
        self._check_room(self.num_preparing + 1, 1)
        self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1

    def admit(self, prompt_tokens: Sequence[int]) -> "Place":
        """Let requests with these prompt lengths wait, all or none of them.

        Raises a 429 with Retry-After while the queue is full, and a 400 where even an empty queue has no room.
        """
        num_requests, num_tokens = len(prompt_tokens), sum(prompt_tokens)
        limits = self._limits
        if num_requests > limits.waiting_requests or num_tokens > limits.waiting_tokens:
            message = (
                f"the request asks for {num_requests} answers with {num_tokens} prompt tokens in all; the queue holds "
                f"{limits.waiting_requests} with {limits.waiting_tokens}: split it into smaller requests"
            )
            raise Problem(400, message, "request_exceeds_queue")
        self._check_room(num_requests, num_tokens)
        self.num_waiting += num_requests
        self.waiting_tokens += num_tokens
        return Place(self, prompt_tokens)

    def _check_room(self, num_requests: int, num_tokens: int) -> None:
        excess_requests = self.num_waiting + num_requests - self._limits.waiting_requests
        excess_tokens = self.waiting_tokens + num_tokens - self._limits.waiting_tokens
        if excess_requests > 0 or excess_tokens > 0:
            seconds = self._retry_seconds(excess_requests, excess_tokens)
            message = (
                f"the server is at its limit: {self.num_waiting} requests with {self.waiting_tokens} prompt tokens "
                f"are waiting and {self.num_preparing} are being read; try again in {seconds} s"
            )
            raise Problem(429, message, "queue_full", headers={"Retry-After": str(seconds)})

    def _retry_seconds(self, excess_requests: int, excess_tokens: int) -> int:
        """Whole seconds, 1 to 60, until that much has left the queue at the speed of the last departures.

        Before anything has left the queue its speed is unknown, and the answer is 1.
        """
        if not self._departures:
            return MIN_RETRY_SECONDS
        elapsed = self._clock() - self._departures[0][0]
        tokens_left = sum(tokens for _, tokens in self._departures)
        waits = [
            elapsed * excess / left if left else math.inf
            for excess, left in ((excess_requests, len(self._departures)), (excess_tokens, tokens_left))
            if excess > 0
        ]
        return math.ceil(min(max(MIN_RETRY_SECONDS, *waits), MAX_RETRY_SECONDS))

    def _leave(self, tokens: int, *, is_starting: bool) -> None:
        self.num_waiting -= 1
        self.waiting_tokens -= tokens
        self.num_running += is_starting
        self._departures.append((self._clock(), tokens))

    def _end(self) -> None:
        self.num_running -= 1


class Place:
    """The places of one admitted request in the queue: one for each of its completions, by index.

    Each method may be called again or late without effect, so the counts can neither go below zero nor leak once
    `close` was called.
    """

    def __init__(self, admission: Admission, prompt_tokens: Sequence[int]) -> None:
        self._admission = admission
        self._waiting = dict(enumerate(prompt_tokens))
        self._running: set[int] = set()

    def started(self, index: int) -> None:
        """The completion runs: it no longer waits."""
        tokens = self._waiting.pop(index, None)
        if tokens is not None:
            self._running.add(index)
            self._admission._leave(tokens, is_starting=True)

    def ended(self, index: int) -> None:
        """The completion is over, whether it has started or not."""
        tokens = self._waiting.pop(index, None)
        if tokens is not None:
            self._admission._leave(tokens, is_starting=False)
        elif index in self._running:
            self._running.remove(index)
            self._admission._end()

    def close(self) -> None:
        """Every completion is over."""
        for index in [*self._waiting, *self._running]:
            self.ended(index)
