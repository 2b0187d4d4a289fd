"""How many drafts each request makes in a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

AUTO_DRAFTS = 4
MAX_SPECULATIVE_TOKENS = 8
FIRST_CHANCE = 0.6
FIRST_COST = 0.25
LARGEST_COST = 4.0
LEAST_GAIN = 1.08
SHARED_RATE = 0.02
TIME_RATE = 0.4
OWN_MEMORY = 0.95
IDLE_MEMORY = 0.995
SHARED_WEIGHT = 4.0
WARM_STEPS = 8
COLD_WEIGHT = 1 / 3
RESTART_CHANCE = 0.9
RESTART_TOKENS = 2.0
TRIED_REQUESTS = 16
TRIED_STEPS = 2
COMPARED_STEPS = 4
LONGEST_TRIAL = 16
FIRST_TRIALS = 4
TRIAL_GAP = 32
TRIAL_SHARE = 0.007
NEAR = 0.25


@dataclass(slots=True)
class _Request:
    """What is known of one request: its drafts that were tried and that were right, by position, older ones less.

    `warm_steps` counts the steps in a row in which it made drafts, from `WARM_STEPS` for one that began with its
    prompt. It makes a draft in each of its next `tried_steps` in any case.
    """

    tried: list[float]
    right: list[float]
    warm_steps: int = WARM_STEPS
    tried_steps: int = 0


@dataclass(slots=True)
class _Trial:
    """Steps in which every request makes `num_drafts`: how many there were, and the seconds of those that count."""

    num_drafts: int
    num_steps: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Size:
    """Measurements of decode steps of about one number of requests.

    `times` has the time of a step by the drafts that every request makes, as multiples of one without drafts; those
    that were not measured are not in it. `recent` has the drafts per request and the seconds of the last steps outside
    of trials, `last_trials` the number of the last trial of each number of drafts.
    """

    times: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    recent: list[tuple[float, float]] = field(default_factory=list)
    steps_to_trial: int = COMPARED_STEPS
    trial: _Trial | None = None
    num_trials: int = 0
    last_trials: dict[int, int] = field(default_factory=dict)

    def time(self, num_drafts: float) -> float:
        """The time of a step with this many drafts per request: on the line between those measured, or beyond them."""
        if len(self.times) == 1:
            return 1.0 + FIRST_COST * num_drafts
        below = max(count for count in self.times if count <= num_drafts)
        above = min((count for count in self.times if count > num_drafts), default=None)
        if above is None:
            return 1.0 + (self.times[below] - 1.0) * num_drafts / below
        part = (num_drafts - below) / (above - below)
        return self.times[below] + (self.times[above] - self.times[below]) * part

    def learn(self, num_drafts: float, time: float) -> None:
        """Take in a measured time of a step, as that of the whole number of drafts next to its own."""
        count = max(1, round(num_drafts))
        cost = min(max(0.0, (time - 1.0) / num_drafts), LARGEST_COST)
        before = self.times.get(count)
        measured = 1.0 + cost * count
        self.times[count] = measured if before is None else before + TIME_RATE * (measured - before)


@dataclass(slots=True)
class Drafts:
    """Chooses how many drafts each request makes; `max_drafts` where it does not adapt, else 0 to that many.

    The chance of a draft is the product of the shares of right drafts at its position and those before it. The shares
    of all requests are exponential averages; those of a request count beside them, the more the more drafts it had.
    The drafts of a step are ordered, likeliest first, and as many of them are made as give the most tokens for the
    time; none where that is less than 8% more than without, because prompts cost more where drafts are made and
    times are measured on a machine that does other things too.

    The MTP layer attends to the positions that it has seen. After steps without drafts these are few, and its drafts
    are right less often for a while. So wrong drafts soon behind such a gap count for a third, and a request begins
    again only where its drafts pay clearly. Every 16th request makes a draft in each of its first two steps in any
    case.

    The time of a step by its drafts per request is measured by trials, for each number of requests up to a power of
    two: in a few steps every request makes the same other number of drafts, and the median of their seconds is
    compared with that of the steps just before. So it does not matter that a machine is slower at one time than at
    another. Where drafts are made, none, one fewer and one more are tried in turns; where none are made, one is. The
    trials of a size begin at once and are frequent at first. Later the next one comes the later the more tokens the
    last one has lost: trials cost about a hundredth of the tokens.

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
        tried_steps = 0 if self._num_added % TRIED_REQUESTS else TRIED_STEPS
        self._num_added += 1
        self._requests[request_id] = _Request([0.0] * self.max_drafts, [0.0] * self.max_drafts, tried_steps=tried_steps)

    def forget(self, request_id: int) -> None:
        """Forget a request; one that is not known changes nothing."""
        self._requests.pop(request_id, None)

    def choose(self, request_ids: Sequence[int], is_decoding: bool) -> list[int]:
        """How many drafts each of the requests of a step makes; a trial has only steps in which all of them decode."""
        if not self.is_adaptive or not self.max_drafts:
            return [self.max_drafts] * len(request_ids)
        size = self._size(len(request_ids))
        requests = [self._requests[request_id] for request_id in request_ids]
        if size.trial is not None and is_decoding:
            return [size.trial.num_drafts] * len(requests)
        counts = _most_tokens([self._chances(request) for request in requests], size)
        return [max(count, min(1, request.tried_steps)) for count, request in zip(counts, requests, strict=True)]

    def submitted(self, request_ids: Sequence[int], counts: Sequence[int]) -> None:
        """Take in that a step began in which the requests make these numbers of drafts."""
        if not self.is_adaptive or not self.max_drafts:
            return
        for request_id, count in zip(request_ids, counts, strict=True):
            request = self._requests[request_id]
            request.warm_steps = request.warm_steps + 1 if count else 0
            if not count:
                request.tried = [tried * IDLE_MEMORY for tried in request.tried]
                request.right = [right * IDLE_MEMORY for right in request.right]

    def observe(self, request_id: int, num_drafts: int, num_right: int, has_ended: bool) -> None:
        """Take in that the first `num_right` of a request's drafts were right, and the next wrong unless it ended.

        Wrong drafts of a request that has just begun to make some again count for a third.
        """
        request = self._requests.get(request_id)
        if request is not None and num_drafts:
            request.tried_steps = max(0, request.tried_steps - 1)
        wrong_weight = COLD_WEIGHT if request is not None and request.warm_steps < WARM_STEPS else 1.0
        for position in range(min(num_drafts, num_right + (not has_ended))):
            is_right = position < num_right
            weight = 1.0 if is_right else wrong_weight
            self._shares[position] += SHARED_RATE * weight * (is_right - self._shares[position])
            if request is not None:
                request.tried[position] = request.tried[position] * OWN_MEMORY + weight
                request.right[position] = request.right[position] * OWN_MEMORY + is_right

    def observe_step(self, num_requests: int, num_verified: int, num_made: int, seconds: float) -> None:
        """Take in the time of a step in which every request decoded, and the drafts that it verified and made."""
        if not self.is_adaptive or not self.max_drafts:
            return
        size = self._size(num_requests)
        per_request = (num_verified + num_made) / (2 * num_requests)
        trial = size.trial
        if trial is None:
            size.recent = [*size.recent, (per_request, seconds)][-COMPARED_STEPS:]
            size.steps_to_trial -= 1
            if size.steps_to_trial <= 0 and len(size.recent) == COMPARED_STEPS:
                size.trial = _Trial(self._choose_trial(size))
            return
        trial.num_steps += 1
        if abs(per_request - trial.num_drafts) < NEAR:
            trial.seconds.append(seconds)
        if len(trial.seconds) == COMPARED_STEPS:
            self._finish_trial(size, trial)
        elif trial.num_steps == LONGEST_TRIAL:
            self._end_trial(size, trial)

    def _size(self, num_requests: int) -> _Size:
        return self._sizes.setdefault((num_requests - 1).bit_length(), _Size())

    def _choose_trial(self, size: _Size) -> int:
        """The number of drafts whose trial is the longest ago, of those beside what the last steps had."""
        made = round(fmean(count for count, _ in size.recent))
        others = {0, made - 1, made + 1} - {made} if made else {1}
        return min((size.last_trials.get(count, 0), count) for count in others if 0 <= count <= self.max_drafts)[1]

    def _finish_trial(self, size: _Size, trial: _Trial) -> None:
        """Compare a trial with the steps before it."""
        num_drafts = fmean(count for count, _ in size.recent)
        ratio = median(trial.seconds) / median(seconds for _, seconds in size.recent)
        if trial.num_drafts:
            size.learn(trial.num_drafts, size.time(num_drafts) * ratio)
        elif num_drafts >= NEAR:
            size.learn(num_drafts, 1.0 / ratio)
        self._end_trial(size, trial)

    def _end_trial(self, size: _Size, trial: _Trial) -> None:
        """Go back to the best choice, and set when the next trial comes."""
        size.trial = None
        size.recent = []
        size.num_trials += 1
        size.last_trials[trial.num_drafts] = size.num_trials
        size.steps_to_trial = COMPARED_STEPS
        if size.num_trials >= FIRST_TRIALS:
            size.steps_to_trial = max(TRIAL_GAP, round(self._lost_steps(size, trial) / TRIAL_SHARE))

    def _lost_steps(self, size: _Size, trial: _Trial) -> float:
        """How many steps the tokens take that a trial has lost, beside the best equal number of drafts."""
        chance, tokens = 1.0, [1.0]
        for share in self._shares:
            chance *= share
            tokens.append(tokens[-1] + chance)
        speeds = [made / size.time(count) for count, made in enumerate(tokens)]
        best = speeds.index(max(speeds))
        lost = trial.num_steps * (speeds[best] * size.time(trial.num_drafts) - tokens[trial.num_drafts])
        if best and not trial.num_drafts:
            lost += RESTART_TOKENS
        return lost / tokens[best]

    def _chances(self, request: _Request) -> list[float]:
        """The chance of each draft of a request to be right with all before it."""
        chance, chances = (1.0 if request.warm_steps else RESTART_CHANCE), []
        for share, tried, right in zip(self._shares, request.tried, request.right, strict=True):
            chance *= (right + SHARED_WEIGHT * share) / (tried + SHARED_WEIGHT)
            chances.append(chance)
        return chances


def _most_tokens(chances: Sequence[Sequence[float]], size: _Size) -> list[int]:
    """How many drafts of each request give the most tokens for the time of the step."""
    num_requests = len(chances)
    likeliest_first = sorted(
        ((chance, -index) for index, of_request in enumerate(chances) for chance in of_request), reverse=True
    )
    times = [size.time(count) for count in range(len(likeliest_first) // num_requests + 2)]
    tokens = float(num_requests)
    best_speed, num_made = LEAST_GAIN * tokens, 0
    for count, (chance, _) in enumerate(likeliest_first, start=1):
        whole, rest = divmod(count, num_requests)
        tokens += chance
        speed = tokens / (times[whole] + (times[whole + 1] - times[whole]) * rest / num_requests)
        if speed > best_speed:
            best_speed, num_made = speed, count
    counts = [0] * num_requests
    for _, negative_index in likeliest_first[:num_made]:
        counts[-negative_index] += 1
    return counts
