"""How many drafts each request makes in a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

AUTO_DRAFTS = 4
MAX_SPECULATIVE_TOKENS = 8
FIRST_CHANCE = 0.6
FIRST_COST = 0.25
LARGEST_COST = 4.0
SHARED_RATE = 0.02
TIME_RATE = 0.2
COST_RATE = 0.1
OWN_MEMORY = 0.95
IDLE_MEMORY = 0.99
SHARED_WEIGHT = 4.0
TRIAL_REQUESTS = 16
TRIAL_STEPS = 2
PLAIN_STEPS = 3
FIRST_PLAIN_AFTER = 8
PLAIN_AFTER = 256
RETRY_AFTER = 1024


@dataclass(slots=True)
class _Request:
    """What is known of one request: its drafts that were tried and that were right, by position, older ones less."""

    trial_steps: int
    tried: list[float]
    right: list[float]


@dataclass(slots=True)
class _Size:
    """Measurements of decode steps of about one number of requests.

    `cost` is what one draft of every request adds to a step, as a share of `seconds`, those of a step without drafts.
    """

    cost: float = FIRST_COST
    seconds: float | None = None
    drafted_steps: int = 0
    idle_steps: int = 0
    plain_left: int = 0


@dataclass(slots=True)
class Drafts:
    """Chooses how many drafts each request makes; `max_drafts` where it does not adapt, else 0 to that many.

    The chance of a draft is the product of the shares of right drafts at its position and those before it. The shares
    of all requests are exponential averages; those of a request count beside them, the more the more drafts it had.
    Draft after draft, likeliest first, is added while it raises the tokens per second of the step: while its chance,
    divided by the time it costs, is above the tokens of the step, divided by its time.

    The cost comes from measured decode steps, by number of requests up to a power of two. A step without drafts tells
    the time to compare with: after 8 steps with drafts, then after every 256, three are measured without. Where
    drafts do not pay, none are made, except that every 16th request makes one in each of its first two steps, and that
    after every 1,024 steps without drafts half of what was learned of the cost is forgotten.

    The choice depends on outcomes and measured times alone, and no answer depends on the choice.
    """

    max_drafts: int
    is_adaptive: bool = False
    _shares: list[float] = field(init=False)
    _requests: dict[int, _Request] = field(init=False, default_factory=dict)
    _sizes: dict[int, _Size] = field(init=False, default_factory=dict)
    _num_added: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._shares = [FIRST_CHANCE] * self.max_drafts

    def add(self, request_id: int) -> None:
        """Take in a new request."""
        trial_steps = 0 if self._num_added % TRIAL_REQUESTS else TRIAL_STEPS
        self._num_added += 1
        self._requests[request_id] = _Request(trial_steps, [0.0] * self.max_drafts, [0.0] * self.max_drafts)

    def forget(self, request_id: int) -> None:
        """Forget a request; one that is not known changes nothing."""
        self._requests.pop(request_id, None)

    def choose(self, request_ids: Sequence[int]) -> list[int]:
        """How many drafts each of the requests of a step makes."""
        if not self.is_adaptive or not self.max_drafts:
            return [self.max_drafts] * len(request_ids)
        size = self._size(len(request_ids))
        if size.plain_left:
            return [0] * len(request_ids)
        requests = [self._requests[request_id] for request_id in request_ids]
        counts = self._most_tokens([self._chances(request) for request in requests], size.cost)
        for index, request in enumerate(requests):
            if counts[index]:
                continue
            request.tried = [count * IDLE_MEMORY for count in request.tried]
            request.right = [count * IDLE_MEMORY for count in request.right]
            if request.trial_steps:
                request.trial_steps -= 1
                counts[index] = 1
        return counts

    def observe(self, request_id: int, num_drafts: int, num_right: int, has_ended: bool) -> None:
        """Take in that the first `num_right` of a request's drafts were right, and the next wrong unless it ended."""
        request = self._requests.get(request_id)
        for position in range(min(num_drafts, num_right + (not has_ended))):
            is_right = position < num_right
            self._shares[position] += SHARED_RATE * (is_right - self._shares[position])
            if request is not None:
                request.tried[position] = request.tried[position] * OWN_MEMORY + 1
                request.right[position] = request.right[position] * OWN_MEMORY + is_right

    def observe_step(self, num_requests: int, num_verified: int, num_made: int, seconds: float) -> None:
        """Take in the time of a step in which every request decoded, and the drafts that it verified and made."""
        size = self._size(num_requests)
        per_request = (num_verified + num_made) / (2 * num_requests)
        if not per_request:
            size.seconds = _toward(size.seconds, seconds)
            size.plain_left = max(0, size.plain_left - 1)
            size.drafted_steps = 0
            size.idle_steps += 1
            if size.idle_steps >= RETRY_AFTER:
                size.idle_steps = 0
                size.cost = (size.cost + FIRST_COST) / 2
            return
        size.idle_steps = 0
        size.drafted_steps += 1
        if size.drafted_steps >= (FIRST_PLAIN_AFTER if size.seconds is None else PLAIN_AFTER):
            size.drafted_steps = 0
            size.plain_left = PLAIN_STEPS
        if size.seconds is not None:
            cost = min(max(0.0, (seconds / size.seconds - 1) / per_request), LARGEST_COST)
            size.cost += COST_RATE * min(1.0, per_request) * (cost - size.cost)

    def _size(self, num_requests: int) -> _Size:
        return self._sizes.setdefault((num_requests - 1).bit_length(), _Size())

    def _chances(self, request: _Request) -> list[float]:
        """The chance of each draft of a request to be right with all before it."""
        chance, chances = 1.0, []
        for share, tried, right in zip(self._shares, request.tried, request.right, strict=True):
            chance *= (right + SHARED_WEIGHT * share) / (tried + SHARED_WEIGHT)
            chances.append(chance)
        return chances

    def _most_tokens(self, chances: Sequence[Sequence[float]], cost: float) -> list[int]:
        """How many drafts of each request give the most tokens for the time, a step without drafts taking 1 each."""
        counts = [0] * len(chances)
        tokens = time = float(len(chances))
        likeliest_first = sorted(
            ((chance, -index) for index, of_request in enumerate(chances) for chance in of_request), reverse=True
        )
        for chance, negative_index in likeliest_first:
            if chance * time <= cost * tokens:
                break
            tokens += chance
            time += cost
            counts[-negative_index] += 1
        return counts


def _toward(average: float | None, seconds: float) -> float:
    """An average that follows the times; one beyond twice the average counts as twice."""
    return seconds if average is None else average + TIME_RATE * (min(seconds, 2 * average) - average)
