"""The scheduler with drafts in few pages: a step goes without drafts before anybody loses its pages."""

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from glint.engine.scheduler import Scheduler
from glint.engine.step_plan import StepItem, StepPlan


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

    @property
    def max_tokens(self) -> int:
        return self.prompt_tokens + self.max_new_tokens


@dataclass
class DraftingMachine:
    """Runs one step after the other with the page arithmetic of the native engine; drafts are right at random."""

    num_pages: int
    page_tokens: int
    works: dict[int, Drafter]
    scheduler: Scheduler
    chances: random.Random
    num_preempted: int = 0
    plans: list[StepPlan] = field(default_factory=list)

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    @property
    def available_pages(self) -> int:
        return self.num_pages - sum(self.pages_of(work.paged_tokens) for work in self.works.values())

    def ends(self, plan: StepPlan, with_drafts: bool) -> dict[int, tuple[int, int]]:
        """How far each request computes, and how far it needs pages."""
        found = {}
        for request_id, advance in plan.items:
            work = self.works[request_id]
            drafts, made = (work.num_drafts, work.max_drafts) if with_drafts else (0, 0)
            end = min(work.computed_tokens + advance, work.known_tokens + drafts)
            found[request_id] = end, min(end + made, work.max_tokens)
        return found

    def missing_pages(self, ends: dict[int, tuple[int, int]]) -> int:
        grown = (
            max(0, self.pages_of(paged) - self.pages_of(self.works[key].paged_tokens))
            for key, (_, paged) in ends.items()
        )
        return sum(grown) - self.available_pages

    def make_room(self, plan: StepPlan) -> None:
        """Let the scheduler find pages for a plan that was refused."""
        if self.scheduler.drop_drafts():
            for request_id, _ in plan.items:
                self.works[request_id].num_drafts = 0
            return
        assert self.missing_pages(self.ends(plan, with_drafts=False)) > 0, "drafts took the pages of a request"
        request_id = self.scheduler.preempt_for_pages()
        assert request_id is not None, "a request that fits alone was given up"
        work = self.works[request_id]
        work.computed_tokens = work.paged_tokens = work.num_drafts = 0
        self.num_preempted += 1

    def step(self) -> None:
        """Submit the next plan that fits, and collect it."""
        while True:
            plan = self.scheduler.plan(self.available_pages)
            assert plan.items, "work is left but nothing was planned"
            ends = self.ends(plan, plan.may_draft)
            if self.missing_pages(ends) <= 0:
                break
            self.make_room(plan)
        self.plans.append(plan)
        awaited = {key for key in ends if plan.may_draft and self.works[key].max_drafts}
        computed = sum(end - self.works[key].computed_tokens for key, (end, _) in ends.items())
        assert self.scheduler.start_step(plan, {}, awaited) == computed
        self.scheduler.finish_step(plan)
        for request_id, (end, paged) in ends.items():
            self.collect(request_id, end, paged, request_id in awaited)

    def collect(self, request_id: int, end: int, paged: int, is_awaited: bool) -> None:
        """Sample behind the last known token and behind right drafts; what is beyond them goes back."""
        work = self.works[request_id]
        work.computed_tokens, work.paged_tokens = end, paged
        if end < work.known_tokens:
            return
        verified = end - work.known_tokens
        new_tokens = min(1 + self.chances.randint(0, verified), work.max_tokens - work.known_tokens)
        work.known_tokens += new_tokens
        work.computed_tokens = work.known_tokens - 1
        work.paged_tokens = work.computed_tokens + is_awaited
        work.is_finished = work.known_tokens == work.max_tokens
        if work.is_finished:
            self.scheduler.remove(request_id)
            work.paged_tokens = 0
        elif is_awaited:
            most = min(work.max_drafts, work.max_tokens - work.known_tokens - 1)
            work.num_drafts = self.chances.randint(0, max(0, most))
            self.scheduler.take_drafts(request_id, new_tokens, work.num_drafts)

    def run_to_end(self) -> None:
        for request_id, work in self.works.items():
            work.known_tokens = work.prompt_tokens
            sizes = work.prompt_tokens, work.max_new_tokens
            self.scheduler.add(request_id, *sizes, max_drafts=work.max_drafts)
        while self.scheduler.has_work:
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
    return DraftingMachine(num_pages + 1, page_tokens, works, scheduler, chances)


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
    assert first.may_draft and scheduler.start_step(first, {}, {0, 1}) == 6
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
