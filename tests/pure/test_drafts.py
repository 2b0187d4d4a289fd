"""How many drafts are made: from outcomes and times alone, and none where they do not pay."""

from __future__ import annotations

import random

import pytest

from glint.engine.drafts import (
    AUTO_DRAFTS,
    FIRST_PLAIN_AFTER,
    PLAIN_AFTER,
    PLAIN_STEPS,
    RETRY_AFTER,
    TRIAL_REQUESTS,
    TRIAL_STEPS,
    Drafts,
)


class Machine:
    """Requests whose drafts are right with one chance, on a machine where a draft costs a share of a step."""

    def __init__(self, chance: float, cost: float, num_requests: int = 1, seed: int = 0) -> None:
        self.drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
        self.chance, self.cost = chance, cost
        self.source = random.Random(seed)
        self.ids = list(range(num_requests))
        self.given = dict.fromkeys(self.ids, 0)
        self.tokens = self.seconds = 0.0
        self.choices: list[list[int]] = []
        for request_id in self.ids:
            self.drafts.add(request_id)

    def step(self) -> None:
        """Run one step: choose, verify what the step before made, and tell the outcome."""
        counts = self.drafts.choose(self.ids)
        verified = sum(self.given.values())
        seconds = 0.01 * (1 + self.cost * (verified + sum(counts)) / 2 / len(self.ids))
        for request_id in self.ids:
            given = self.given[request_id]
            right = next((place for place in range(given) if self.source.random() >= self.chance), given)
            self.tokens += 1 + right
            self.drafts.observe(request_id, given, right, has_ended=False)
        self.drafts.observe_step(len(self.ids), verified, sum(counts), seconds)
        self.seconds += seconds
        self.given = dict(zip(self.ids, counts, strict=True))
        self.choices.append(counts)

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


@pytest.mark.parametrize("num_requests", [1, 3, 16])
@pytest.mark.parametrize("cost", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_the_gain_is_about_the_best_and_never_a_loss(chance: float, cost: float, num_requests: int) -> None:
    machine = Machine(chance, cost, num_requests)
    machine.run(300)
    gain = machine.run(3000 // num_requests + 700)
    assert gain > 0.985
    assert gain > 0.93 * ideal_gain(chance, cost)


@pytest.mark.parametrize(("chance", "cost"), [(0.0, 0.2), (0.5, 3.0)])
def test_where_drafts_do_not_pay_almost_none_are_made(chance: float, cost: float) -> None:
    machine = Machine(chance, cost)
    machine.run(400)
    machine.choices.clear()
    machine.run(400)
    assert sum(sum(counts) for counts in machine.choices) <= 12


def test_a_request_that_is_hard_to_guess_does_not_stop_the_others() -> None:
    drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
    drafts.add(0)
    drafts.add(1)
    for _ in range(200):
        drafts.observe(0, 4, 4, has_ended=False)
        drafts.observe(1, 4, 0, has_ended=False)
    for _ in range(TRIAL_STEPS + 1):
        counts = drafts.choose([0, 1])
    assert counts[0] == 4 and counts[1] == 0


def test_a_request_may_be_guessed_again_later() -> None:
    drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
    for request_id in range(TRIAL_REQUESTS):
        drafts.add(request_id)
    easy, hard = 1, 2
    for _ in range(200):
        drafts.observe(hard, 4, 0, has_ended=False)
    for _ in range(200):
        drafts.observe(easy, 4, 4, has_ended=False)
    assert drafts.choose([easy, hard])[1] == 0
    assert any(drafts.choose([easy, hard])[1] for _ in range(400))


def test_the_time_without_drafts_is_measured_early_and_then_rarely() -> None:
    machine = Machine(0.9, 0.1)
    machine.run(2000)
    plain = [step for step, counts in enumerate(machine.choices) if counts == [0]]
    assert plain[0] == FIRST_PLAIN_AFTER and len(plain) <= (1 + PLAIN_STEPS) * (2 + 2000 // PLAIN_AFTER)


def test_every_so_many_requests_are_tried_in_any_case() -> None:
    drafts = Drafts(AUTO_DRAFTS, is_adaptive=True)
    for _ in range(400):
        drafts.observe(-1, 1, 0, has_ended=False)
    tried = []
    for request_id in range(2 * TRIAL_REQUESTS + 1):
        drafts.add(request_id)
        tried.append(sum(drafts.choose([request_id])[0] for _ in range(2 * TRIAL_STEPS)))
        drafts.forget(request_id)
    assert [place for place, count in enumerate(tried) if count] == [0, TRIAL_REQUESTS, 2 * TRIAL_REQUESTS]
    assert set(tried) == {0, TRIAL_STEPS}


def test_a_cost_that_was_measured_wrong_is_forgotten() -> None:
    machine = Machine(0.9, 30.0)
    machine.run(200)
    machine.cost = 0.1
    assert machine.run(300) < 1.05
    machine.run(8 * RETRY_AFTER)
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
    assert drafts.choose([0, 1]) == [count, count]
