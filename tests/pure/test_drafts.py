"""How many drafts are made: from outcomes and times alone, and none where they do not pay."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from glint.engine.drafts import (
    AUTO_DRAFTS,
    COLD_WEIGHT,
    COMPARED_STEPS,
    DRAFT_COST,
    FIRST_CHANCE,
    FIRST_GAP,
    FIXED_ROWS,
    KEPT_COSTS,
    LEAST_GAIN,
    LONGEST_PAUSE,
    LONGEST_TRIAL,
    MAX_STEP_DRAFTS,
    SHARED_RATE,
    TRIED_GAP,
    TRIED_STEPS,
    WARM_STEPS,
    Drafts,
    _Size,
)


def begin_step(drafts: Drafts, request_ids: list[int], is_decoding: bool = True) -> list[int]:
    """What the requests of a step make."""
    counts = drafts.choose(request_ids, is_decoding)
    drafts.submitted(request_ids, counts)
    return counts


class Machine:
    """Requests whose drafts are right with one chance, on a machine where a draft costs a share of a step.

    In the first steps behind one without drafts, the first draft is right with two thirds of the chance. Where it runs
    ahead, a step is chosen before the outcome of the one before is known.

    With noise a machine is up to half as slow again for a while, each step takes a tenth more or less, and every tenth
    one takes three times as long.
    """

    def __init__(
        self,
        chance: float,
        cost: float,
        num_requests: int = 1,
        seed: int = 0,
        has_noise: bool = False,
        max_step_drafts: int = MAX_STEP_DRAFTS,
        runs_ahead: bool = False,
    ) -> None:
        self.drafts = Drafts(AUTO_DRAFTS, is_adaptive=True, max_step_drafts=max_step_drafts)
        self.chance, self.cost, self.has_noise = chance, cost, has_noise
        self.source, self.noise = random.Random(seed), random.Random(seed + 1)
        self.ids = list(range(num_requests))
        self.given = dict.fromkeys(self.ids, 0)
        self.warm_steps = dict.fromkeys(self.ids, WARM_STEPS)
        self.tokens = self.seconds = 0.0
        self.choices: list[list[int]] = []
        for request_id in self.ids:
            self.drafts.add(request_id)
        self.ahead = [begin_step(self.drafts, self.ids)] if runs_ahead else []

    def step(self) -> None:
        """Run one step: choose, verify what the step before made, and tell the outcome."""
        self.ahead.append(self.begin())
        counts = self.ahead.pop(0)
        verified = sum(self.given.values())
        seconds = 0.01 * self.time_of((verified + sum(counts)) / 2 / len(self.ids))
        for request_id in self.ids:
            given = self.given[request_id]
            is_cold = self.warm_steps[request_id] <= WARM_STEPS
            chances = [self.chance * (2 / 3 if is_cold and not place else 1) for place in range(given)]
            right = next((place for place in range(given) if self.source.random() >= chances[place]), given)
            self.warm_steps[request_id] = self.warm_steps[request_id] + 1 if counts[request_id] else 0
            self.tokens += 1 + right
            self.drafts.observe(request_id, given, right, has_ended=False)
        self.drafts.observe_step(len(self.ids), verified, sum(counts), seconds * self.slowness())
        self.seconds += seconds
        self.given = dict(zip(self.ids, counts, strict=True))
        self.choices.append(counts)

    def begin(self) -> list[int]:
        """The drafts that each request makes in this step."""
        return begin_step(self.drafts, self.ids)

    def time_of(self, per_request: float) -> float:
        """The time of a step with so many drafts per request, as a multiple of one without."""
        return 1 + self.cost * per_request

    def slowness(self) -> float:
        """How much longer the step takes than on a quiet machine."""
        if not self.has_noise:
            return 1.0
        drift = 1.25 + 0.25 * math.sin(len(self.choices) / 40)
        return drift * self.noise.uniform(0.9, 1.1) * (3 if self.noise.random() < 0.1 else 1)

    def run(self, steps: int) -> float:
        """Tokens per second over these steps, as multiples of those without drafts."""
        self.tokens = self.seconds = 0.0
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds * 0.01 / len(self.ids)


def ideal_gain(chance: float, cost: float) -> float:
    """The best that any fixed number of drafts gives."""
    return max(
        sum(chance**place for place in range(count + 1)) / (1 + cost * count) for count in range(AUTO_DRAFTS + 1)
    )


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_requests", [1, 3, 16])
@pytest.mark.parametrize("cost", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_the_gain_is_about_the_best_and_never_a_loss(
    chance: float, cost: float, num_requests: int, runs_ahead: bool
) -> None:
    machine = Machine(chance, cost, num_requests, runs_ahead=runs_ahead)
    machine.run(300)
    gain = machine.run(3000 // num_requests + 700)
    assert gain > 0.97
    assert gain > 0.93 * ideal_gain(chance, cost)


@pytest.mark.parametrize(("chance", "cost"), [(0.0, 0.2), (0.5, 3.0)])
def test_where_drafts_do_not_pay_almost_none_are_made(chance: float, cost: float) -> None:
    machine = Machine(chance, cost)
    machine.run(1500)
    machine.choices.clear()
    machine.run(400)
    assert sum(sum(counts) for counts in machine.choices) <= 40


def test_a_request_that_is_hard_to_guess_does_not_stop_the_others() -> None:
    drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
    drafts.add(0)
    drafts.add(1)
    for _ in range(200):
        drafts.observe(0, 4, 4, has_ended=False)
        drafts.observe(1, 4, 0, has_ended=False)
    counts = begin_step(drafts, [0, 1])
    assert counts[0] == 4 and counts[1] == 0


def test_a_request_may_be_guessed_again_later() -> None:
    drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
    easy, hard = 1, 2
    drafts.add(easy)
    drafts.add(hard)
    for _ in range(200):
        drafts.observe(hard, 4, 0, has_ended=False)
    for _ in range(200):
        drafts.observe(easy, 4, 4, has_ended=False)
    assert begin_step(drafts, [easy, hard])[1] == 0
    assert any(begin_step(drafts, [easy, hard])[1] for _ in range(400))


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_on_a_noisy_machine_drafts_that_pay_are_made_soon_and_others_are_not(
    num_requests: int, runs_ahead: bool
) -> None:
    for seed in range(20):
        paying = Machine(0.8, 0.3, num_requests, seed, has_noise=True, runs_ahead=runs_ahead)
        assert paying.run(64) > 1.15
        assert paying.run(1000) > (0.85 if runs_ahead else 0.9) * ideal_gain(0.8, 0.3)
        losing = Machine(0.4, 1.0, num_requests, seed, has_noise=True, runs_ahead=runs_ahead)
        losing.run(200)
        assert losing.run(1000) > 0.97


class AwaitingMachine(Machine):
    """A machine that begins the next step before the time of one is known, but not behind one with drafts."""

    begun: list[int] | None = None

    def begin(self) -> list[int]:
        counts = super().begin() if self.begun is None else self.begun
        self.begun = None if any(counts) or any(self.given.values()) else super().begin()
        return counts


@pytest.mark.parametrize("cost", [0.3, 0.6])
@pytest.mark.parametrize("awaits_drafts", [False, True])
def test_costs_are_right_where_steps_overlap(cost: float, awaits_drafts: bool) -> None:
    machine = AwaitingMachine(0.9, cost) if awaits_drafts else Machine(0.9, cost, runs_ahead=True)
    machine.run(600)
    learned = machine.drafts._size(1).time(1) - 1.0
    assert learned == pytest.approx(cost, rel=0.03)


def test_a_step_that_was_chosen_before_a_trial_was_over_is_not_compared() -> None:
    drafts = Drafts(2, is_adaptive=True)
    drafts.add(0)
    size = drafts._size(1)
    while size.trial is None or not size.trial.is_over:
        drafts.observe_step(1, 0, 0 if size.trial is None else size.trial.num_drafts, 0.01)
    trial, tried = size.trial, size.trial.num_drafts
    drafts.observe_step(1, tried, tried, 0.01)
    assert trial.after == []
    for verified, made in ((tried, 0), (0, tried), (tried, 0)):
        drafts.observe_step(1, verified, made, 0.01)
    assert len(trial.after) == 3 and size.trial is trial


class SwayingMachine(Machine):
    """A machine with a request that comes and goes every few steps."""

    def begin(self) -> list[int]:
        if self.source.random() < 0.15:
            if len(self.ids) == 5:
                left = self.ids.pop()
                self.drafts.forget(left)
                del self.given[left]
            else:
                self.ids.append(4)
                self.drafts.add(4)
                self.given[4], self.warm_steps[4] = 0, WARM_STEPS
        return super().begin()


def test_numbers_of_requests_that_change_often_are_measured_too() -> None:
    machine = SwayingMachine(0.5, 1.0, 5)
    machine.run(600)
    machine.tokens = machine.seconds = rows = 0.0
    for _ in range(900):
        machine.step()
        rows += len(machine.ids)
    assert machine.tokens / rows / (machine.seconds / 0.01 / 900) > 0.95


class SlowingMachine(Machine):
    """A machine that takes longer for every step than for the one before."""

    def slowness(self) -> float:
        return 1 + len(self.choices) / 300


def test_a_machine_that_slows_down_does_not_look_like_drafts_that_cost() -> None:
    machine = SlowingMachine(0.8, 0.3)
    machine.run(300)
    assert machine.run(1000) > 0.95 * ideal_gain(0.8, 0.3)


class TiledMachine(Machine):
    """A machine on which the first draft of a request is dear and the others cost nothing until the fourth."""

    def time_of(self, per_request: float) -> float:
        return 1 + 0.5 * min(1.0, per_request) + 2.0 * max(0.0, per_request - 3)


def test_the_time_is_measured_for_every_number_of_drafts() -> None:
    machine = TiledMachine(0.8, 0.0)
    machine.run(400)
    machine.choices.clear()
    machine.run(400)
    assert statistics.mode(counts[0] for counts in machine.choices) == 3


def test_trials_begin_soon_and_come_rarely_where_they_lose_much() -> None:
    machine = Machine(0.9, 0.1)
    machine.run(2000)
    plain = [step for step, counts in enumerate(machine.choices) if counts == [0]]
    assert plain[0] == FIRST_GAP
    assert plain[-1] > 1000 and len(plain) < 100
    dear = Machine(0.5, 3.0)
    dear.run(400)
    dear.choices.clear()
    dear.run(2000)
    assert 0 < sum(sum(counts) for counts in dear.choices) < 40


def without_drafts() -> Drafts:
    """One request with id 0, and outcomes after which none makes drafts."""
    drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
    drafts.add(-1)
    drafts.add(0)
    for _ in range(400):
        drafts.observe(-1, 1, 0, has_ended=False)
    return drafts


def test_a_trial_is_given_up_where_its_drafts_cannot_be_made() -> None:
    drafts = without_drafts()
    chosen = []
    for _ in range(FIRST_GAP + LONGEST_TRIAL + 1):
        chosen.append(begin_step(drafts, [0])[0])
        drafts.observe_step(1, 0, 0, 0.01)
    assert chosen == [0] * FIRST_GAP + [1] * LONGEST_TRIAL + [0]
    assert drafts._size(1).costs == {}


def test_a_trial_counts_where_a_grammar_refuses_drafts() -> None:
    drafts = without_drafts()
    given = 0
    for _ in range(FIRST_GAP + 2 * COMPARED_STEPS + 2):
        made = begin_step(drafts, [0])[0]
        drafts.observe_step(1, 0, made, 0.01 * (1.2 if given else 1.0))
        given = made
    assert drafts._size(1).costs == {1: [pytest.approx(0.4)]}


@pytest.mark.parametrize("after", [COMPARED_STEPS, COMPARED_STEPS + 3])
@pytest.mark.parametrize("pause", [LONGEST_PAUSE - 1, LONGEST_PAUSE])
def test_a_trial_is_given_up_where_many_steps_of_another_size_come_between(after: int, pause: int) -> None:
    drafts = without_drafts()
    drafts.add(1)
    given = 0
    for step in range(FIRST_GAP + 2 * COMPARED_STEPS + 2):
        if step == FIRST_GAP + after:
            for _ in range(pause):
                drafts.observe_step(2, 0, 0, 9.0)
        made = begin_step(drafts, [0])[0]
        drafts.observe_step(1, given, made, 0.01)
        given = made
    assert made == 0
    size = drafts._size(1)
    assert size.trial is None
    assert size.num_trials == (pause < LONGEST_PAUSE)


def test_steps_of_one_size_are_compared_by_their_requests() -> None:
    drafts = without_drafts()
    for request_id in range(1, 8):
        drafts.add(request_id)
    given = 0
    for step in range(FIRST_GAP + 2 * COMPARED_STEPS + 2):
        ids = list(range(8 if step < FIRST_GAP else 6))
        made = sum(begin_step(drafts, ids))
        drafts.observe_step(len(ids), given, made, 0.001 * (FIXED_ROWS + len(ids)))
        given = made
    assert drafts._size(8).costs == {1: [pytest.approx(0.0)]}


@pytest.mark.parametrize(("num_requests", "most"), [(1, 4), (2, 4), (4, 3), (5, 1), (8, 1), (9, 0), (40, 0)])
def test_the_drafts_of_a_step_have_a_bound(num_requests: int, most: int) -> None:
    """Of 12 drafts in all, each of up to 8 requests has one, and none where there are more requests."""
    load = Machine(chance=0.99, cost=0.01, num_requests=num_requests, max_step_drafts=12)
    load.run(200)
    assert max(map(max, load.choices)) == most
    assert all(sum(counts) <= 12 for counts in load.choices)


@pytest.mark.parametrize("max_num_seqs", [3, 5, 8, 20, 33, 48])
def test_a_bound_of_four_drafts_a_request_is_none(max_num_seqs: int) -> None:
    drafts = Drafts(AUTO_DRAFTS, True, max_num_seqs * AUTO_DRAFTS, max_num_seqs)
    assert all(drafts._size(count).max_drafts == AUTO_DRAFTS for count in range(1, max_num_seqs + 1))


def test_times_are_on_lines_until_they_are_measured() -> None:
    size = _Size(0.3, AUTO_DRAFTS)
    assert [size.time(count) for count in (0, 0.5, 2)] == pytest.approx([1.0, 1.15, 1.6])
    size.learn(2, 1.4)
    assert [size.time(count) for count in (1, 2, 4)] == pytest.approx([1.25, 1.45, 2.0])
    for _ in range(KEPT_COSTS):
        size.learn(0.8, 1.4)
    assert [size.time(count) for count in (0.5, 1)] == pytest.approx([1.25, 1.5])
    assert size.time(2) == pytest.approx(1.7)


def test_some_bad_measurements_change_nothing() -> None:
    size = _Size(0.3, AUTO_DRAFTS)
    for time in (1.2, 9.0, 1.2, 1.2, 0.1, 1.2, 9.0):
        size.learn(1, time)
    assert size.time(1) == pytest.approx(1.2)


def test_before_it_is_measured_a_draft_costs_more_among_many_requests() -> None:
    times = [Drafts(1, is_adaptive=True)._size(count).time(1) - DRAFT_COST for count in (1, 8, 32)]
    assert times == pytest.approx([1 + count / (count + FIXED_ROWS) for count in (1, 8, 32)])


def test_a_trial_leaves_steps_with_prompts_alone() -> None:
    drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
    drafts.add(0)
    for _ in range(FIRST_GAP):
        made = begin_step(drafts, [0])[0]
        drafts.observe(0, made, made, has_ended=False)
        drafts.observe_step(1, made, made, 0.01)
    assert made > 0
    assert begin_step(drafts, [0]) == [0]
    for _ in range(100):
        made = begin_step(drafts, [0], is_decoding=False)[0]
        assert made > 0
        drafts.observe(0, made, made, has_ended=False)
    assert begin_step(drafts, [0]) == [0]


def test_every_so_many_requests_are_tried_in_any_case() -> None:
    drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
    for _ in range(400):
        drafts.observe(-1, 1, 0, has_ended=False)
    tried = []
    for request_id in range(7 * TRIED_GAP + 1):
        drafts.add(request_id)
        count = 0
        for _ in range(2 * TRIED_STEPS):
            made = begin_step(drafts, [request_id])[0]
            begin_step(drafts, [request_id])
            drafts.observe(request_id, made, 0, has_ended=False)
            count += made
        tried.append(count)
        drafts.forget(request_id)
    assert [place for place, count in enumerate(tried) if count] == [0, TRIED_GAP, 3 * TRIED_GAP, 7 * TRIED_GAP]
    assert set(tried) == {0, TRIED_STEPS}
    assert drafts._tried_gap == 16 * TRIED_GAP
    for _ in range(400):
        drafts.observe(-1, 1, 1, has_ended=False)
    drafts.add(-2)
    assert begin_step(drafts, [-2])[0] > 0 and drafts._tried_gap == TRIED_GAP


def test_wrong_drafts_soon_behind_a_gap_count_for_a_third() -> None:
    for warm_steps, weight in ((1, COLD_WEIGHT), (WARM_STEPS - 1, COLD_WEIGHT), (WARM_STEPS, 1.0)):
        drafts = Drafts(1, is_adaptive=True)
        drafts.add(0)
        drafts._requests[0].warm_steps = warm_steps
        drafts.observe(0, 1, 0, has_ended=False)
        assert drafts._shares[0] == pytest.approx(FIRST_CHANCE * (1 - SHARED_RATE * weight))
        assert drafts._requests[0].tried == [pytest.approx(weight)]


def learn_time(drafts: Drafts, time: float) -> None:
    """Let the time of a step with one draft of one request be known."""
    for _ in range(KEPT_COSTS):
        drafts._size(1).learn(1, time)


def test_drafts_that_would_pay_a_little_are_not_made() -> None:
    chosen = []
    for gain in (LEAST_GAIN - 0.005, LEAST_GAIN + 0.005):
        drafts = Drafts(1, is_adaptive=True)
        drafts.add(-1)
        drafts.add(0)
        learn_time(drafts, (1.0 + FIRST_CHANCE) / gain)
        chosen.append(begin_step(drafts, [0]))
    assert chosen == [[0], [1]]


def test_a_request_goes_on_where_it_would_not_begin_again() -> None:
    chosen = []
    for warm_steps in (0, 1, WARM_STEPS):
        drafts = Drafts(1, is_adaptive=True)
        drafts.add(-1)
        drafts.add(0)
        learn_time(drafts, 0.985 * (1.0 + FIRST_CHANCE) / LEAST_GAIN)
        drafts._requests[0].warm_steps = warm_steps
        chosen.append(begin_step(drafts, [0]))
    assert chosen == [[0], [1], [1]]


def test_drafts_that_did_not_pay_are_tried_again() -> None:
    machine = Machine(0.9, 30.0)
    machine.run(200)
    machine.cost = 0.1
    assert machine.run(300) < 1.05
    machine.run(10000)
    assert machine.run(500) > 1.5


def test_the_end_of_an_answer_is_not_a_wrong_draft() -> None:
    drafts = Drafts(2, is_adaptive=True)
    before = list(drafts._shares)
    drafts.observe(0, 2, 0, has_ended=True)
    assert drafts._shares == before
    drafts.observe(0, 2, 1, has_ended=False)
    assert drafts._shares[0] > before[0] and drafts._shares[1] < before[1]


def test_the_same_outcomes_and_times_give_the_same_choices() -> None:
    runs = [Machine(0.6, 0.3, 5, seed=3) for _ in range(2)]
    for machine in runs:
        machine.run(500)
    assert runs[0].choices == runs[1].choices


@pytest.mark.parametrize("count", [0, 3])
def test_a_fixed_number_is_always_made(count: int) -> None:
    drafts = Drafts(count)
    drafts.add(0)
    for _ in range(50):
        drafts.observe(0, count, 0, has_ended=False)
        drafts.observe_step(1, count, count, 5.0)
    assert begin_step(drafts, [0, 1]) == [count, count]
