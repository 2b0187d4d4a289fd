"""How many drafts each request makes in a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

AUTO_DRAFTS = 4
MAX_SPECULATIVE_TOKENS = 8
FIRST_CHANCE = 0.6
FIXED_ROWS = 12.0
DRAFT_COST = 0.05
LARGEST_COST = 4.0
ANCHOR_COSTS = 2
KEPT_COSTS = 15
LEAST_GAIN = 1.03
PART_GAIN = 1.05
SHARED_RATE = 0.02
OWN_MEMORY = 0.97
IDLE_MEMORY = 0.995
SHARED_WEIGHT = 16.0
WARM_STEPS = 10
COLD_WEIGHT = 1 / 3
COLD_CHANCE = 0.5
RESTART_CHANCE = 0.9
RESTART_TOKENS = 2.0
TRIED_GAP = 16
LONGEST_TRIED_GAP = 1024
TRIED_STEPS = 4
COMPARED_STEPS = 3
LONGEST_TRIAL = 8
LONGEST_PAUSE = 8
FIRST_TRIALS = 4
FIRST_GAP = 16
TRIAL_GAP = 32
TRIAL_SHARE = 0.007
CLEAR_LOSS = 1.5
LEAST_DRAFTS = 0.25
REQUESTS_PER_IDLE_STEP = 8
MAX_STEP_DRAFTS = 2**14


@dataclass(slots=True)
class _Request:
    """What is known of one request: its drafts that were tried and that were right, by position, older ones less.

    `warm_steps` counts the steps in a row in which it made drafts, from `WARM_STEPS` for one that began with its
    prompt. It makes a draft in each of its next `tried_steps` in any case. `idle_steps` without drafts are not counted
    in what it has tried yet.
    """

    tried: list[float]
    right: list[float]
    warm_steps: int = WARM_STEPS
    tried_steps: int = 0
    idle_steps: int = 0

    def count_idle_steps(self) -> None:
        """Let what was tried count less for the steps without drafts since."""
        if self.idle_steps:
            memory = IDLE_MEMORY**self.idle_steps
            self.tried = [tried * memory for tried in self.tried]
            self.right = [right * memory for right in self.right]
            self.idle_steps = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """Drafts per request of a step, the mean of those verified and made, and its seconds for its requests."""

    num_drafts: float
    seconds: float


@dataclass(slots=True)
class _Trial:
    """Steps in which every request makes `num_drafts`, and the steps behind them; the first of both is a mixed one.

    A late step was chosen before the last step of the trial was over; it counts for neither.
    """

    num_drafts: int
    num_steps: int = 0
    is_over: bool = False
    has_late_step: bool = False
    steps: list[_Step] = field(default_factory=list)
    after: list[_Step] = field(default_factory=list)


@dataclass(slots=True)
class _Size:
    """Measurements of decode steps of about one number of requests, each of which makes at most `max_drafts`.

    `costs` has, by the drafts that every request makes, what each of them adds to the time of a step, as multiples of
    the time without drafts; `times` follows from it. `recent` has the last steps outside of trials, `last_trials` the
    number of the last trial of each number of drafts. `paused_steps` counts the steps of other sizes since its last.
    The next `idle_steps` make no drafts, as those before did not pay.
    """

    first_cost: float
    max_drafts: int
    costs: dict[int, list[float]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    recent: list[_Step] = field(default_factory=list)
    steps_to_trial: int = FIRST_GAP
    trial: _Trial | None = None
    num_trials: int = 0
    paused_steps: int = 0
    idle_steps: int = 0
    last_trials: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._find_times()

    def time(self, num_drafts: float) -> float:
        """The time of a step with this many drafts per request, as a multiple of one without."""
        whole = int(num_drafts)
        return self.times[whole] + (self.times[whole + 1] - self.times[whole]) * (num_drafts - whole)

    def learn(self, num_drafts: float, time: float) -> None:
        """Take in a measured time of a step, as that of the whole number of drafts next to its own."""
        count = max(1, round(num_drafts))
        cost = min(max(0.0, (time - 1.0) / num_drafts), LARGEST_COST)
        self.costs[count] = [*self.costs.get(count, []), cost][-KEPT_COSTS:]
        self._find_times()

    def drop_trial(self) -> None:
        """Give up a trial, and what it would have been compared with, where many steps of other sizes came between."""
        self.recent = []
        if self.trial is not None:
            self.trial = None
            self.steps_to_trial = TRIAL_GAP

    def _find_times(self) -> None:
        """Medians of the costs of each number of drafts, beside that of all costs and the first."""
        every = median([self.first_cost] + [cost for costs in self.costs.values() for cost in costs])
        self.times = [1.0]
        for count in range(1, MAX_SPECULATIVE_TOKENS + 2):
            cost = median([every, *self.costs.get(count, [])])
            self.times.append(max(self.times[-1], 1.0 + cost * count))


@dataclass(slots=True)
class Drafts:
    """Chooses how many drafts each request makes; `max_drafts` where it does not adapt, else 0 to that many.

    Where it adapts, all requests of a step, at most `max_num_seqs`, together make at most `max_step_drafts`.

    The chance of a draft is the product of the shares of right drafts at its position and those before it. The shares
    of all requests are exponential averages; those of a request count beside them, the more the more drafts it had.
    All requests of a step make the same number of drafts, the one with the most tokens for the time; only where it
    gives 5% more do the likeliest of them make drafts and the others none.

    The MTP layer attends to the positions that it has seen. After steps without drafts these are few, and its drafts
    are right less often for a while. So wrong drafts soon behind such a gap count for a third, and requests begin
    again only where drafts pay clearly. Every 16th request makes a draft in each of its first steps in any case; where
    none pay, ever fewer do, down to every 1,024th.

    The time of a step by its drafts per request is measured by trials, for each number of requests up to a power of
    two. In a few steps every request makes the same other number of drafts, and their median is compared with that of
    the steps just before and behind. So it does not matter that a machine is slower at one time than at another, and of
    all these comparisons the median counts, so that some bad ones do not matter either. Before there are any, a step is
    taken to cost as much as its rows and twelve more. Where drafts are made, none is tried until their time is known,
    then none, one fewer and one more in turns; where none are made, one is. The trials of a size are frequent at first,
    unless drafts lose clearly. Later the next one comes the later the more tokens the last one has lost: trials cost
    about a hundredth of the tokens.

    The choice depends on outcomes and measured times alone, and no answer depends on the choice.
    """

    max_drafts: int
    is_adaptive: bool = False
    max_step_drafts: int = MAX_STEP_DRAFTS
    max_num_seqs: int = MAX_STEP_DRAFTS
    _shares: list[float] = field(init=False)
    _requests: dict[int, _Request] = field(init=False, default_factory=dict)
    _sizes: dict[int, _Size] = field(init=False, default_factory=dict)
    _requests_to_try: int = field(init=False, default=0)
    _tried_gap: int = field(init=False, default=TRIED_GAP)

    def __post_init__(self) -> None:
        self._shares = [FIRST_CHANCE] * self.max_drafts

    def add(self, request_id: int) -> None:
        """Take in a new request."""
        tried_steps = 0 if self._requests_to_try else TRIED_STEPS
        if tried_steps:
            self._requests_to_try = self._tried_gap
            self._tried_gap = min(2 * self._tried_gap, LONGEST_TRIED_GAP)
        self._requests_to_try -= 1
        self._requests[request_id] = _Request([0.0] * self.max_drafts, [0.0] * self.max_drafts, tried_steps=tried_steps)

    def forget(self, request_id: int) -> None:
        """Forget a request; one that is not known changes nothing."""
        self._requests.pop(request_id, None)

    def choose(self, request_ids: Sequence[int], is_decoding: bool) -> list[int]:
        """How many drafts each of the requests of a step makes; a trial has only steps in which all of them decode."""
        if not self.is_adaptive or not self.max_drafts:
            return [self.max_drafts] * len(request_ids)
        size = self._size(len(request_ids))
        if not size.max_drafts:
            return [0] * len(request_ids)
        requests = [self._requests[request_id] for request_id in request_ids]
        if size.trial is not None and not size.trial.is_over and is_decoding:
            return [size.trial.num_drafts] * len(requests)
        counts = self._best_counts(size, requests)
        if any(counts):
            self._tried_gap = TRIED_GAP
        return [max(count, min(1, request.tried_steps)) for count, request in zip(counts, requests, strict=True)]

    def submitted(self, request_ids: Sequence[int], counts: Sequence[int]) -> None:
        """Take in that a step began in which the requests make these numbers of drafts."""
        if not self.is_adaptive or not self.max_drafts:
            return
        for request_id, count in zip(request_ids, counts, strict=True):
            request = self._requests[request_id]
            if count:
                request.warm_steps += 1
            else:
                request.warm_steps = 0
                request.idle_steps += 1

    def observe(self, request_id: int, num_drafts: int, num_right: int, has_ended: bool) -> None:
        """Take in that the first `num_right` of a request's drafts were right, and the next wrong unless it ended.

        Wrong drafts of a request that has just begun to make some again count for a third.
        """
        request = self._requests.get(request_id)
        if request is not None and num_drafts:
            request.tried_steps = max(0, request.tried_steps - 1)
            request.count_idle_steps()
        wrong_weight = COLD_WEIGHT if request is not None and request.warm_steps < WARM_STEPS else 1.0
        for position in range(min(num_drafts, num_right + (not has_ended))):
            is_right = position < num_right
            weight = 1.0 if is_right else wrong_weight
            self._shares[position] += SHARED_RATE * weight * (is_right - self._shares[position])
            if request is not None:
                request.tried[position] = request.tried[position] * OWN_MEMORY + weight
                request.right[position] = request.right[position] * OWN_MEMORY + is_right

    def observe_step(self, num_requests: int, num_verified: int, num_made: int, seconds: float) -> None:
        """Take in the time of a step in which every request decoded, the drafts that it verified and those it made.

        The numbers of requests of one size are compared by the rows that a step costs as much as.
        """
        if not self.is_adaptive or not self.max_drafts:
            return
        size = self._size(num_requests)
        for other in self._sizes.values():
            other.paused_steps = 0 if other is size else other.paused_steps + 1
            if other.paused_steps == LONGEST_PAUSE:
                other.drop_trial()
        if not size.max_drafts:
            return
        step = _Step((num_verified + num_made) / (2 * num_requests), seconds / (FIXED_ROWS + num_requests))
        trial = size.trial
        if trial is None:
            size.recent = [*size.recent, step][-COMPARED_STEPS:]
            size.steps_to_trial -= 1
            if size.steps_to_trial <= 0 and len(size.recent) == COMPARED_STEPS:
                size.trial = _Trial(self._choose_trial(size))
        elif trial.is_over and not trial.has_late_step and num_made == trial.num_drafts * num_requests:
            trial.has_late_step = True
        elif trial.is_over:
            trial.has_late_step = True
            trial.after.append(step)
            if len(trial.after) > COMPARED_STEPS:
                self._finish_trial(size, trial)
        else:
            trial.num_steps += 1
            if num_made == trial.num_drafts * num_requests:
                trial.steps.append(step)
            trial.is_over = len(trial.steps) > COMPARED_STEPS or trial.num_steps == LONGEST_TRIAL

    def _size(self, num_requests: int) -> _Size:
        key = (num_requests - 1).bit_length()
        if key not in self._sizes:
            largest = 1 << key
            most = min(self.max_drafts, self.max_step_drafts // min(largest, self.max_num_seqs))
            self._sizes[key] = _Size(DRAFT_COST + largest / (largest + FIXED_ROWS), most)
        return self._sizes[key]

    def _choose_trial(self, size: _Size) -> int:
        """None until the time of the last steps is known; then, of the numbers beside theirs, the one longest ago."""
        made = round(fmean(step.num_drafts for step in size.recent))
        if made and len(size.costs.get(made, [])) < ANCHOR_COSTS:
            return 0
        others = {0, made - 1, made + 1} - {made} if made else {1}
        return min((size.last_trials.get(count, 0), count) for count in others if 0 <= count <= size.max_drafts)[1]

    def _finish_trial(self, size: _Size, trial: _Trial) -> None:
        """Compare a trial with the steps around it, and set when the next one comes."""
        if len(trial.steps) > COMPARED_STEPS:
            around = size.recent + trial.after[1:]
            usual = median(step.num_drafts for step in around)
            tried = median(step.num_drafts for step in trial.steps[1:])
            ratio = median(step.seconds for step in trial.steps[1:]) / median(step.seconds for step in around)
            if tried >= LEAST_DRAFTS:
                size.learn(tried, size.time(usual) * ratio)
            elif usual >= LEAST_DRAFTS:
                size.learn(usual, 1.0 / ratio)
        size.trial = None
        size.recent = []
        size.idle_steps = 0
        size.num_trials += 1
        size.last_trials[trial.num_drafts] = size.num_trials
        lost_steps = self._lost_steps(size, trial)
        size.steps_to_trial = FIRST_GAP
        is_clear = trial.num_drafts > 0 and lost_steps > CLEAR_LOSS
        if size.num_trials >= FIRST_TRIALS or is_clear:
            size.steps_to_trial = max(TRIAL_GAP, round(lost_steps / TRIAL_SHARE))

    def _lost_steps(self, size: _Size, trial: _Trial) -> float:
        """How many steps the tokens take that a trial has lost, beside the best equal number of drafts.

        Where that is none, the drafts of the trial are right half as often, for want of context.
        """
        chance, tokens = 1.0, [1.0]
        for share in self._shares[: size.max_drafts]:
            chance *= share
            tokens.append(tokens[-1] + chance)
        speeds = [number / size.time(count) for count, number in enumerate(tokens)]
        best = speeds.index(max(speeds))
        made = 1.0 + (tokens[trial.num_drafts] - 1.0) * (1.0 if best else COLD_CHANCE)
        lost = trial.num_steps * (speeds[best] * size.time(trial.num_drafts) - made)
        if best and not trial.num_drafts:
            lost += RESTART_TOKENS
        return lost / tokens[best]

    def _best_counts(self, size: _Size, requests: Sequence[_Request]) -> list[int]:
        """The drafts of each request that give the most tokens; where none do, a step for every eight does not ask."""
        if size.idle_steps:
            size.idle_steps -= 1
            return [0] * len(requests)
        counts = _most_tokens([self._chances(request)[: size.max_drafts] for request in requests], size.time)
        if not any(counts):
            size.idle_steps = len(requests) // REQUESTS_PER_IDLE_STEP
        return counts

    def _chances(self, request: _Request) -> list[float]:
        """The chance of each draft of a request to be right with all before it."""
        request.count_idle_steps()
        chance, chances = (1.0 if request.warm_steps else RESTART_CHANCE), []
        for share, tried, right in zip(self._shares, request.tried, request.right, strict=True):
            chance *= (right + SHARED_WEIGHT * share) / (tried + SHARED_WEIGHT)
            chances.append(chance)
        return chances


def _most_tokens(chances: Sequence[Sequence[float]], time: Callable[[float], float]) -> list[int]:
    """How many drafts of each request give the most tokens for the time of the step.

    All make as many, or the likeliest of them where that is clearly better.
    """
    num_requests = len(chances)
    likeliest_first = sorted(range(num_requests), key=lambda index: (-sum(chances[index]), index))
    best_speed, best_count, num_making = LEAST_GAIN * num_requests, 0, 0
    gains = [0.0] * num_requests
    for count in range(1, 1 + len(chances[0])):
        tokens = float(num_requests)
        for place, index in enumerate(likeliest_first, start=1):
            gains[index] += chances[index][count - 1]
            tokens += gains[index]
            speed = tokens / time(count * place / num_requests)
            if place < num_requests:
                speed /= PART_GAIN
            if speed > best_speed:
                best_speed, best_count, num_making = speed, count, place
    counts = [0] * num_requests
    for index in likeliest_first[:num_making]:
        counts[index] = best_count
    return counts
