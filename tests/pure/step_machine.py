"""A machine of the scheduler's tests: page arithmetic and steps in flight the way the native engine promises them."""

from dataclasses import dataclass, field

from glint.engine.scheduler import Scheduler
from glint.engine.share import DEFAULT_SHARE, Share
from glint.engine.step_plan import StepPlan


@dataclass
class Work:
    """One request: what it asks for, and when it really ends, which the scheduler does not know before."""

    prompt_tokens: int
    max_new_tokens: int
    stops_after: int
    prefix_tokens: int = 0
    arrives_at: int = 0
    share: Share = DEFAULT_SHARE
    computed_tokens: int = 0
    new_tokens: int = 0
    pending_tokens: int = 0
    steps_in_flight: int = 0
    times_preempted: int = 0
    finished_at: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.new_tokens == self.stops_after

    @property
    def known_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens + self.pending_tokens


@dataclass
class Machine:
    """Runs plans with at most `depth` steps in flight, as the engine drives the scheduler, and checks every rule.

    `plans` and `first_scheduled` are what was submitted, in order, `prompt_tokens` the prompt tokens that each plan
    computed by request, `yields` how often a request gave its slot to another key.
    """

    scheduler: Scheduler
    num_pages: int
    page_tokens: int
    works: dict[int, Work]
    depth: int = 2
    num_collected: int = 0
    in_flight: list[StepPlan] = field(default_factory=list)
    samples: list[dict[int, bool]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    first_scheduled: list[int] = field(default_factory=list)
    chunk_ends: dict[int, list[int]] = field(default_factory=dict)
    prompt_tokens: list[dict[int, int]] = field(default_factory=list)
    yields: int = 0

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    @property
    def available_pages(self) -> int:
        return self.num_pages - sum(self.pages_of(work.computed_tokens) for work in self.works.values())

    def add(self, request_id: int, leader_id: int | None = None) -> None:
        work = self.works[request_id]
        self.scheduler.add(request_id, work.prompt_tokens, work.max_new_tokens, leader_id, work.share)

    def find_cached(self, plan: StepPlan) -> dict[int, int]:
        """Whole pages of the prefix that the cache has; the last known token is always computed."""
        found = {}
        for request_id, _ in plan.first_items:
            work = self.works[request_id]
            assert work.computed_tokens == 0, "a request that holds pages was planned as a new one"
            reusable = min(work.prefix_tokens, work.known_tokens - 1)
            found[request_id] = reusable // self.page_tokens * self.page_tokens
        return found

    def submit(self, plan: StepPlan) -> bool:
        """All or nothing: take the pages and start the step, or say that they are missing."""
        cached = self.find_cached(plan)
        ends = {}
        for request_id, advance_tokens in plan.items:
            work = self.works[request_id]
            begin = cached.get(request_id, work.computed_tokens)
            assert 0 < advance_tokens and begin < work.known_tokens, "nothing to compute was planned"
            ends[request_id] = min(begin + advance_tokens, work.known_tokens)
        grown = {key: self.pages_of(end) - self.pages_of(self.works[key].computed_tokens) for key, end in ends.items()}
        if sum(grown.values()) > self.available_pages:
            return False
        num_tokens = 0
        self.prompt_tokens.append({})
        for request_id, end in ends.items():
            work = self.works[request_id]
            count = end - cached.get(request_id, work.computed_tokens)
            num_tokens += count
            if work.new_tokens + work.pending_tokens == 0:
                self.prompt_tokens[-1][request_id] = count
            work.computed_tokens = end
            work.steps_in_flight += 1
            self.chunk_ends.setdefault(request_id, []).append(end)
            if request_id not in self.first_scheduled:
                self.first_scheduled.append(request_id)
        sampled = {key: end == self.works[key].known_tokens for key, end in ends.items()}
        for request_id, samples in sampled.items():
            self.works[request_id].pending_tokens += samples
        assert self.scheduler.start_step(plan, cached) == num_tokens
        self.in_flight.append(plan)
        self.samples.append(sampled)
        self.plans.append(plan)
        return True

    def submit_next(self) -> bool:
        """Submit the next plan; preempt for it only while nothing is in flight."""
        while True:
            yielding_id = self.scheduler.find_yielding()
            if yielding_id is not None:
                if self.in_flight:
                    return False
                self.scheduler.preempt(yielding_id)
                self.take_pages(yielding_id)
                self.yields += 1
            before = self.scheduler.plan(self.available_pages)
            plan = self.scheduler.plan(self.available_pages)
            assert plan == before, "planning changed the scheduler"
            if not plan.items:
                return False
            if self.submit(plan):
                return True
            if self.in_flight:
                return False
            self.preempt()

    def preempt(self) -> None:
        request_id = self.scheduler.preempt_for_pages()
        assert request_id is not None, "a request that fits alone was given up"
        self.take_pages(request_id)

    def take_pages(self, request_id: int) -> None:
        """A request was preempted: its pages are gone."""
        work = self.works[request_id]
        assert work.steps_in_flight == 0
        work.computed_tokens = 0
        work.times_preempted += 1

    def collect(self) -> list[int]:
        """End the oldest step in flight and return the requests that ended in it."""
        plan, sampled = self.in_flight.pop(0), self.samples.pop(0)
        self.scheduler.finish_step(plan)
        self.num_collected += 1
        ended = []
        for request_id, samples in sampled.items():
            work = self.works[request_id]
            work.steps_in_flight -= 1
            work.pending_tokens -= samples
            if not work.is_finished:
                work.new_tokens += samples
                if work.is_finished:
                    ended.append(request_id)
                    work.finished_at = self.num_collected
                    self.scheduler.remove(request_id)
            if work.is_finished and work.steps_in_flight == 0:
                work.computed_tokens = 0
        return ended

    def cancel(self, request_id: int) -> None:
        """The client of a request leaves; what is in flight of it still runs."""
        work = self.works[request_id]
        work.stops_after = work.new_tokens
        self.scheduler.remove(request_id)
        if work.steps_in_flight == 0:
            work.computed_tokens = 0

    def step(self) -> StepPlan:
        """One call of the engine: keep `depth` steps in flight, then collect the oldest."""
        while len(self.in_flight) < self.depth and self.submit_next():
            pass
        assert self.in_flight, "work is left but nothing was planned"
        plan = self.in_flight[0]
        self.collect()
        return plan

    def run_to_end(self) -> None:
        """Let requests arrive when their time has come and run until all have ended."""
        waiting = sorted(self.works, key=lambda key: (self.works[key].arrives_at, key))
        while waiting or self.scheduler.has_work:
            while waiting and (self.works[waiting[0]].arrives_at <= self.num_collected or not self.scheduler.has_work):
                self.works[waiting[0]].arrives_at = self.num_collected
                self.add(waiting.pop(0))
            self.step()
        while self.in_flight:
            self.collect()

    def run_to_end_of_queue(self) -> None:
        """Run what was added by hand until all has ended."""
        while self.scheduler.has_work:
            self.step()
        while self.in_flight:
            self.collect()
