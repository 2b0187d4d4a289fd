"""The bounded queue: which requests may wait for their first step."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from glint.engine.share import DEFAULT_SHARE, Share
from glint.server.http.problems import Problem
from glint.server.limits import Limits

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
NUM_REMEMBERED_DEPARTURES = 64


@dataclass(slots=True)
class _KeyUsage:
    """The use of the queue by one key: requests that wait or are prepared, and prompt tokens that wait."""

    weight: int
    preparing: int = 0
    waiting: int = 0
    tokens: int = 0


class Admission:
    """Counts the requests and the prompt tokens in the bounded queue. For one thread.

    It counts the requests that wait for their first step, and those that are prepared before they wait. A request that
    has started no longer counts, even when it is preempted later. A refusal changes nothing.

    One key may fill the queue, but cannot keep another key out. Each key in the queue has a share of it by weight. A
    key below its share is admitted until the queue is twice as long as its limits.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._departures: deque[tuple[float, int]] = deque(maxlen=NUM_REMEMBERED_DEPARTURES)
        self._departed_tokens = 0
        self._num_changes = 0
        self._last_refusal: tuple[tuple[Share, int, int], Problem | None] | None = None
        self._by_key: dict[str | int, _KeyUsage] = {}
        self.num_preparing = 0
        self.num_waiting = 0
        self.num_running = 0
        self.waiting_tokens = 0

    @contextmanager
    def preparing(self, share: Share = DEFAULT_SHARE) -> Iterator[None]:
        """Count a request while it is prepared; refuses it before any work while the queue is full."""
        problem = self._find_refusal(share, 1, 1, is_prepared=False)
        if problem is not None:
            raise problem
        self._count(share, preparing=1)
        try:
            yield
        finally:
            self._count(share, preparing=-1)

    def find_refusal(self, share: Share = DEFAULT_SHARE) -> Problem | None:
        """The 429 for a request that is not read yet while the queue is full; None where it has room.

        Many requests may get the same refusal: it holds until the queue changes, and its Retry-After for 0.1 s.
        """
        situation = share, self._num_changes, int(10 * self._clock())
        if self._last_refusal is None or self._last_refusal[0] != situation:
            self._last_refusal = situation, self._find_refusal(share, 1, 1, is_prepared=False)
        return self._last_refusal[1]

    def admit(self, prompt_tokens: Sequence[int], share: Share = DEFAULT_SHARE) -> "QueueSlot":
        """Admit requests with these prompt lengths to the queue, all or none of them.

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
        problem = self._find_refusal(share, num_requests, num_tokens, is_prepared=True)
        if problem is not None:
            raise problem
        self._count(share, waiting=num_requests, tokens=num_tokens)
        return QueueSlot(self, prompt_tokens, share)

    def _count(self, share: Share, preparing: int = 0, waiting: int = 0, tokens: int = 0) -> None:
        """Change the counts of the queue and of one key."""
        self._num_changes += 1
        self.num_preparing += preparing
        self.num_waiting += waiting
        self.waiting_tokens += tokens
        usage = self._by_key.setdefault(share.key, _KeyUsage(share.weight))
        usage.preparing += preparing
        usage.waiting += waiting
        usage.tokens += tokens
        if not (usage.preparing or usage.waiting):
            del self._by_key[share.key]

    def _find_refusal(self, share: Share, num_requests: int, num_tokens: int, *, is_prepared: bool) -> Problem | None:
        """The refusal of what has no room. Requests in preparation count against one that is not prepared yet."""
        limits = self._limits
        requests = self.num_waiting + num_requests + (0 if is_prepared else self.num_preparing)
        tokens = self.waiting_tokens + num_tokens
        if requests <= limits.waiting_requests and tokens <= limits.waiting_tokens:
            return None
        usage = self._by_key.get(share.key, _KeyUsage(share.weight))
        weights = sum(other.weight for key, other in self._by_key.items() if key != share.key) + share.weight
        own_requests = usage.waiting + num_requests + (0 if is_prepared else usage.preparing)
        own_tokens = usage.tokens + num_tokens
        full = [
            (what, limit, limit * share.weight // weights)
            for what, limit, total, own in (
                ("requests", limits.waiting_requests, requests, own_requests),
                ("prompt tokens", limits.waiting_tokens, tokens, own_tokens),
            )
            if total > limit and (total > 2 * limit or own > limit * share.weight // weights)
        ]
        if not full:
            return None
        what, limit, fair = full[0]
        seconds = self._retry_seconds(requests - limits.waiting_requests, tokens - limits.waiting_tokens)
        held = "" if weights == share.weight else f"; this key may hold {fair} {what} while others wait"
        message = (
            f"the server is at its limit of {limit} {what} in the queue: {self.num_waiting} requests with "
            f"{self.waiting_tokens} prompt tokens are waiting and {self.num_preparing} are being read{held}; "
            f"try again in {seconds} s"
        )
        return Problem(429, message, "queue_full", headers={"Retry-After": str(seconds)})

    def _retry_seconds(self, excess_requests: int, excess_tokens: int) -> int:
        """Whole seconds, 1 to 60, until that much has left the queue at the rate of the last departures.

        Before the first departure the rate is unknown, and the result is 1.
        """
        if not self._departures:
            return MIN_RETRY_SECONDS
        elapsed = self._clock() - self._departures[0][0]
        waits = [
            elapsed * excess / left if left else math.inf
            for excess, left in ((excess_requests, len(self._departures)), (excess_tokens, self._departed_tokens))
            if excess > 0
        ]
        return math.ceil(min(max(MIN_RETRY_SECONDS, *waits), MAX_RETRY_SECONDS))

    def _leave(self, share: Share, tokens: int, *, is_starting: bool) -> None:
        self._count(share, waiting=-1, tokens=-tokens)
        self.num_running += is_starting
        if len(self._departures) == NUM_REMEMBERED_DEPARTURES:
            self._departed_tokens -= self._departures[0][1]
        self._departed_tokens += tokens
        self._departures.append((self._clock(), tokens))

    def _end(self) -> None:
        self.num_running -= 1


class QueueSlot:
    """The slots of one admitted request in the queue: one for each of its choices, by index.

    A repeated or late call of a method has no effect, so the counts can neither go below zero nor leak once `close` was
    called.
    """

    def __init__(self, admission: Admission, prompt_tokens: Sequence[int], share: Share) -> None:
        self._admission = admission
        self._share = share
        self._waiting = dict(enumerate(prompt_tokens))
        self._running: set[int] = set()

    def started(self, index: int) -> None:
        """The choice runs: it no longer waits."""
        tokens = self._waiting.pop(index, None)
        if tokens is not None:
            self._running.add(index)
            self._admission._leave(self._share, tokens, is_starting=True)

    def ended(self, index: int) -> None:
        """The choice has ended, whether it had started or not."""
        tokens = self._waiting.pop(index, None)
        if tokens is not None:
            self._admission._leave(self._share, tokens, is_starting=False)
        elif index in self._running:
            self._running.remove(index)
            self._admission._end()

    def close(self) -> None:
        """Every choice has ended."""
        for index in [*self._waiting, *self._running]:
            self.ended(index)
