"""The choice of drafts on a noisy machine with measured times: about as fast as the best fixed number, never a loss."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from glint.engine.drafts import AUTO_DRAFTS, Drafts

AVX512_TIMES = {
    1: 11.3,
    2: 13.2,
    3: 15.5,
    4: 17.4,
    5: 19.8,
    8: 23.0,
    16: 37.0,
    24: 47.0,
    32: 56.5,
    64: 102.0,
    160: 255.0,
}
AMX_TIMES = {1: 12.0, 2: 15.2, 3: 17.6, 4: 19.8, 5: 21.0, 8: 21.0, 16: 28.5, 24: 36.0, 32: 43.0, 64: 76.0, 160: 180.0}
SHARES = (0.61, 0.59, 0.63, 0.60)
LARGEST_SHARE = 0.97
SPREAD = 0.15
CONTEXT_TOKENS = 12
COLD_SHARE = 0.55
TURNS = 6
SEEDS = range(4)


def step_time(times: dict[int, float], rows: int, made: list[int]) -> float:
    """Milliseconds of a step that computes so many rows and makes these drafts."""
    above = min(count for count in times if count >= rows)
    below = max(count for count in times if count <= rows)
    part = (rows - below) / (above - below) if above > below else 0.0
    drafting = sum(0.5 + 0.1 * sum(count > place for count in made) for place in range(max(made)))
    return times[below] + (times[above] - times[below]) * part + drafting


@dataclass
class Answer:
    """A request: the chance of each draft, the tokens it still writes, its drafts and what the MTP layer has seen."""

    shares: list[float]
    left: int
    given: int = 0
    seen: int = CONTEXT_TOKENS

    def verify(self, source: random.Random) -> int:
        """How many of its drafts are right; the first is so less often where the layer has seen little."""
        first = COLD_SHARE + (1 - COLD_SHARE) * min(1.0, self.seen / CONTEXT_TOKENS)
        for place in range(self.given):
            if source.random() >= self.shares[place] * (1.0 if place else first):
                return place
        return self.given


@dataclass
class Replay:
    """Answers requests with a choice of drafts; it is told the times of a machine that other work slows down."""

    drafts: Drafts
    times: dict[int, float]
    acceptance: float
    source: random.Random
    noise: random.Random
    drift: float = 0.0
    slow_steps: int = 0
    num_added: int = 0
    milliseconds: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)

    def slowness(self) -> float:
        """Slower by up to half for a while, a little more or less in each step, and twice as slow now and then."""
        self.drift = min(0.4, max(0.0, self.drift + self.noise.gauss(0, 0.04)))
        if self.slow_steps:
            self.slow_steps -= 1
        elif self.noise.random() < 0.04:
            self.slow_steps = self.noise.choice((1, 1, 1, 3, 8))
        return math.exp(self.drift + self.noise.gauss(0, 0.06)) * (2 if self.slow_steps else 1)

    def begin(self, count: int, tokens: int) -> None:
        """Start some requests with a step of their prompts, which takes no time here."""
        for _ in range(count):
            spread = self.source.uniform(-SPREAD, SPREAD)
            shares = [min(LARGEST_SHARE, max(0.0, share * self.acceptance + spread)) for share in SHARES]
            self.answers[self.num_added] = Answer(shares, tokens)
            self.drafts.add(self.num_added)
            self.num_added += 1
        self.make(self.choose(is_decoding=False))

    def choose(self, is_decoding: bool = True) -> list[int]:
        """The drafts that each request makes in the next step."""
        counts = self.drafts.choose([*self.answers], is_decoding)
        self.drafts.submitted([*self.answers], counts)
        return counts

    def make(self, counts: list[int]) -> None:
        """Give the requests their drafts, as many as they have room for; without any the layer's context is lost."""
        for answer, count in zip(self.answers.values(), counts, strict=True):
            answer.given = max(0, min(count, answer.left - 1))
            answer.seen = answer.seen if count else 0

    def step(self) -> None:
        """Verify the drafts of the step before and make the next."""
        counts = self.choose()
        given = sum(answer.given for answer in self.answers.values())
        num_requests = len(counts)
        milliseconds = step_time(self.times, num_requests + given, counts)
        for request_id, answer in self.answers.items():
            num_right = min(answer.verify(self.source), answer.left - 1)
            answer.left -= 1 + num_right
            answer.seen += 1 + num_right
            self.drafts.observe(request_id, answer.given, num_right, has_ended=not answer.left)
        self.make(counts)
        for request_id in [request_id for request_id, answer in self.answers.items() if not answer.left]:
            del self.answers[request_id]
            self.drafts.forget(request_id)
        self.drafts.observe_step(num_requests, given, sum(counts), milliseconds / 1000 * self.slowness())
        self.milliseconds += milliseconds

    def run(self, num_requests: int) -> float:
        """Milliseconds of some turns of requests that start at once, behind one turn that is not counted."""
        for turn in range(1 + TURNS):
            if turn == 1:
                self.milliseconds = 0.0
            self.begin(num_requests, 128 if num_requests < 32 else 64)
            while self.answers:
                self.step()
        return self.milliseconds


def total_time(make: Callable[[], Drafts], times: dict[int, float], acceptance: float, num_requests: int) -> float:
    """Milliseconds of the same requests with one choice of drafts, over all seeds."""
    return sum(
        Replay(make(), times, acceptance, random.Random(seed), random.Random(-1 - seed)).run(num_requests)
        for seed in SEEDS
    )


@pytest.mark.parametrize("acceptance", [1.25, 1.0, 0.6, 0.33], ids=lambda scale: f"{0.61 * scale:.2f}")
@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("times", [AVX512_TIMES, AMX_TIMES], ids=["avx512", "amx"])
def test_auto_is_about_the_best_number_and_never_a_loss(
    times: dict[int, float], num_requests: int, acceptance: float
) -> None:
    chosen = total_time(partial(Drafts, AUTO_DRAFTS, is_adaptive=True), times, acceptance, num_requests)
    fixed = [total_time(partial(Drafts, count), times, acceptance, num_requests) for count in range(AUTO_DRAFTS + 1)]
    assert chosen * (0.985 if num_requests == 32 else 0.96) < fixed[0]
    assert chosen * 0.95 < min(fixed)
