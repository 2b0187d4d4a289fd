"""The scheduler with drafts in few pages: a step goes without drafts before anybody loses its pages."""

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from glint.engine.scheduler import Scheduler
from glint.engine.step_plan import StepItem, StepPlan


@dataclass
class InFlight:
    """A request's part of a step in flight: the end of what it computes, drafts that it verifies and makes at most."""

    end: int
    verified: int
    made: int
    samples: bool


@dataclass
class Drafter:
    """One request and what the engine keeps of it: tokens that are known and computed, drafts, tokens with pages."""

    prompt_tokens: int
    max_new_tokens: int
    max_drafts: int
    known_tokens: int = 0
    computed_tokens: int = 0
    paged_tokens: int = 0
    num_drafts: int = 0
    is_finished: bool = False
    items: list[InFlight] = field(default_factory=list)

    @property
    def max_tokens(self) -> int:
        return self.prompt_tokens + self.max_new_tokens

    @property
    def most_known_tokens(self) -> int:
        """Tokens that are known once the steps in flight are done, where all drafts are right."""
        return self.known_tokens + sum(1 + item.verified for item in self.items if item.samples)

    @property
    def begin(self) -> int:
        """Where the next step begins, where all drafts are right."""
        return self.items[-1].end if self.items else self.computed_tokens

    @property
    def coming_drafts(self) -> int:
        """Drafts that the next step may verify."""
        return self.items[-1].made * self.items[-1].samples if self.items else self.num_drafts


@dataclass
class DraftingMachine:
    """Keeps up to `depth` steps in flight with the page arithmetic of the native engine; drafts are right at random.

    Pages are reserved for drafts that are all right.
    """

    num_pages: int
    page_tokens: int
    works: dict[int, Drafter]
    scheduler: Scheduler
    chances: random.Random
    depth: int
    num_preempted: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    in_flight: list[StepPlan] = field(default_factory=list)

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    @property
    def available_pages(self) -> int:
        return self.num_pages - sum(self.pages_of(work.paged_tokens) for work in self.works.values())

    def items_of(self, plan: StepPlan, with_drafts: bool) -> dict[int, InFlight]:
        """What each request computes at most."""
        found = {}
        for request_id, advance in plan.items:
            work = self.works[request_id]
            drafts, made = (work.coming_drafts, work.max_drafts) if with_drafts else (0, 0)
            end = min(work.begin + advance, work.most_known_tokens + drafts)
            assert end > work.begin, "nothing to compute was planned"
            verified = max(0, end - work.most_known_tokens)
            found[request_id] = InFlight(end, verified, made, end >= work.most_known_tokens)
        return found

    def paged(self, work: Drafter, item: InFlight) -> int:
        return max(work.paged_tokens, min(item.end + item.made, work.max_tokens))

    def missing_pages(self, items: dict[int, InFlight]) -> int:
        grown = (
            self.pages_of(self.paged(self.works[key], item)) - self.pages_of(self.works[key].paged_tokens)
            for key, item in items.items()
        )
        return sum(grown) - self.available_pages

    def make_room(self, plan: StepPlan) -> None:
        """Let the scheduler find pages for a plan that was refused."""
        if self.scheduler.drop_drafts():
            for request_id, _ in plan.items:
                self.works[request_id].num_drafts = 0
            return
        assert self.missing_pages(self.items_of(plan, with_drafts=False)) > 0, "drafts took the pages of a request"
        request_id = self.scheduler.preempt_for_pages()
        assert request_id is not None, "a request that fits alone was given up"
        work = self.works[request_id]
        work.computed_tokens = work.paged_tokens = work.num_drafts = 0
        self.num_preempted += 1

    def submit_next(self) -> bool:
        """Submit the next plan that fits; pages are taken from others only while nothing is in flight."""
        while True:
            plan = self.scheduler.plan(self.available_pages)
            if not plan.items:
                return False
            items = self.items_of(plan, plan.may_draft)
            if self.missing_pages(items) <= 0:
                break
            if self.in_flight:
                return False
            self.make_room(plan)
        assert [request_id for request_id, advance in plan.items[: plan.num_decodes] if advance < 1] == []
        num_tokens = sum(item.end - self.works[key].begin for key, item in items.items())
        assert num_tokens <= plan.num_tokens
        made = {key: self.works[key].max_drafts if plan.may_draft else 0 for key in items}
        self.scheduler.start_step(plan, {}, made)
        for key, item in items.items():
            self.works[key].paged_tokens = self.paged(self.works[key], item)
            self.works[key].items.append(item)
        self.plans.append(plan)
        self.in_flight.append(plan)
        return True

    def step(self) -> None:
        """Keep steps in flight, and collect the oldest."""
        while len(self.in_flight) < self.depth and self.submit_next():
            pass
        assert self.in_flight, "work is left but nothing was planned"
        plan = self.in_flight.pop(0)
        self.scheduler.finish_step(plan)
        for request_id, _ in plan.items:
            self.collect(request_id)

    def collect(self, request_id: int) -> None:
        """Sample behind the last known token and behind right drafts; what is beyond them goes back."""
        work = self.works[request_id]
        item = work.items.pop(0)
        if work.is_finished:
            work.paged_tokens = work.paged_tokens if work.items else 0
            return
        if not item.samples:
            work.computed_tokens = item.end
            return
        verified = min(item.verified, work.num_drafts)
        new_tokens = min(1 + self.chances.randint(0, verified), work.max_tokens - work.known_tokens)
        work.known_tokens += new_tokens
        work.computed_tokens = work.known_tokens - 1
        for ahead in work.items:
            ahead.end = work.known_tokens + ahead.verified
        work.is_finished = work.known_tokens == work.max_tokens
        if work.is_finished:
            self.scheduler.remove(request_id)
        elif item.verified + item.made:
            most = min(item.made, work.max_tokens - work.known_tokens - 1)
            work.num_drafts = self.chances.randint(0, max(0, most))
            left = [min(ahead.end + ahead.made, work.max_tokens) for ahead in work.items]
            work.paged_tokens = min(work.paged_tokens, max([work.known_tokens, *left]))
            self.scheduler.take_drafts(request_id, new_tokens, None if work.items else work.num_drafts)
        if work.is_finished and not work.items:
            work.paged_tokens = 0

    def run_to_end(self) -> None:
        for request_id, work in self.works.items():
            work.known_tokens = work.prompt_tokens
            sizes = work.prompt_tokens, work.max_new_tokens
            self.scheduler.add(request_id, *sizes, max_drafts=work.max_drafts)
        while self.scheduler.has_work:
            self.step()
        while self.in_flight:
            self.step()


@st.composite
def machines(draw: st.DrawFn, may_draft: bool = True) -> DraftingMachine:
    page_tokens = draw(st.integers(1, 6))
    num_pages = draw(st.integers(1, 24))
    capacity = page_tokens * num_pages
    max_drafts = draw(st.integers(1, 8))
    works = {}
    for request_id in range(draw(st.integers(1, 8))):
        prompt_tokens = draw(st.integers(1, max(1, capacity - 1)))
        max_new_tokens = draw(st.integers(1, max(1, capacity - prompt_tokens)))
        drafts = draw(st.sampled_from((0, max_drafts, max_drafts))) if may_draft else 0
        works[request_id] = Drafter(prompt_tokens, max_new_tokens, drafts)
    scheduler = Scheduler(
        draw(st.integers(1 + max_drafts, 60)), draw(st.integers(1, 6)), page_tokens, max_drafts if may_draft else 0
    )
    chances = random.Random(draw(st.integers(0, 2**16)))
    depth = draw(st.integers(1, 2))
    return DraftingMachine(num_pages + 1, page_tokens, works, scheduler, chances, depth)


@given(machines())
def test_drafts_take_the_pages_of_nobody(machine: DraftingMachine) -> None:
    """The machine looks at every preemption: the step did not fit without drafts either."""
    machine.run_to_end()
    assert all(work.is_finished for work in machine.works.values())
    assert machine.available_pages == machine.num_pages
    for plan in machine.plans:
        assert plan.num_tokens <= machine.scheduler._max_step_tokens
        assert len(plan.items) <= machine.scheduler.max_running


@given(machines(may_draft=False))
def test_without_drafts_there_are_none_to_drop(machine: DraftingMachine) -> None:
    machine.run_to_end()
    assert all(plan.may_draft for plan in machine.plans)


def test_a_step_without_drafts_is_followed_by_one_with_them() -> None:
    scheduler = Scheduler(20, 2, page_tokens=4, max_drafts=3)
    for request_id in (0, 1):
        scheduler.add(request_id, 3, 30, max_drafts=3)
    first = scheduler.plan(100)
    assert first.may_draft and scheduler.start_step(first, {}, {0: 3, 1: 3}) == 6
    scheduler.finish_step(first)
    scheduler.take_drafts(0, 1, 3)
    scheduler.take_drafts(1, 1, 2)
    assert scheduler.plan(100).items == (StepItem(0, 4), StepItem(1, 3))
    assert scheduler.drop_drafts()
    second = scheduler.plan(100)
    assert second.items == (StepItem(0, 1), StepItem(1, 1)) and not second.may_draft
    assert not scheduler.drop_drafts() and scheduler.num_running == 2
    assert scheduler.start_step(second, {}) == 2
    scheduler.finish_step(second)
    third = scheduler.plan(100)
    assert third.may_draft and third.items == second.items
    assert scheduler.drop_drafts() and scheduler.preempt_for_pages() == 1
    assert not scheduler.drop_drafts() and not scheduler.plan(100).may_draft


def test_a_step_is_planned_for_all_drafts_that_the_one_in_flight_may_make() -> None:
    """Of 3 + 8 tokens one is known for certain behind the prompt, and each further step brings one at least."""
    scheduler = Scheduler(40, 2, page_tokens=4, max_drafts=3)
    scheduler.add(0, 3, 8, max_drafts=3)
    plans = []
    for _ in range(2):
        plans.append(scheduler.plan(100))
        scheduler.start_step(plans[-1], {}, {0: 3})
    assert [plan.items for plan in plans] == [(StepItem(0, 3),), (StepItem(0, 4),)]
    scheduler.finish_step(plans[0])
    scheduler.take_drafts(0, 1, None)
    assert scheduler.plan(100).items == (StepItem(0, 4),)
    third = scheduler.plan(100)
    scheduler.start_step(third, {}, {0: 3})
    scheduler.finish_step(plans[1])
    scheduler.take_drafts(0, 4, None)
    fourth = scheduler.plan(100)
    assert fourth.items == (StepItem(0, 2),)
    scheduler.finish_step(third)
    scheduler.take_drafts(0, 1, 1)
    assert scheduler.plan(100).items == (StepItem(0, 2),)
    scheduler.start_step(scheduler.plan(100), {}, {0: 3})
    assert scheduler.plan(100).items == (StepItem(0, 1),)
    scheduler.take_drafts(0, 2, 0)
    assert scheduler.plan(100).items == ()


def test_no_step_is_planned_behind_a_last_token_that_drafts_brought_early() -> None:
    scheduler = Scheduler(40, 2, page_tokens=4, max_drafts=3)
    scheduler.add(0, 3, 5, max_drafts=3)
    plans = []
    for _ in range(3):
        plans.append(scheduler.plan(100))
        scheduler.start_step(plans[-1], {}, {0: 3})
        if len(plans) > 1:
            scheduler.finish_step(plans[-2])
            scheduler.take_drafts(0, 1 if len(plans) == 2 else 3, None)
    assert scheduler.plan(100).items == ()
